"""The site's table of contents. A new page needs a line here; `tests/test_documents.py` says so if it is missing.

It is put below the first page when the site is built, so that this page stays readable on a forge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests read this file without Sphinx
    from sphinx.application import Sphinx

FIRST_PAGE = "docs/index"

NAVIGATION = {
    "Tutorials": [
        "docs/tutorials/sparsify-your-model",
        "docs/tutorials/keep-to-a-budget",
        "docs/tutorials/your-own-loop",
        "docs/tutorials/ship-it",
    ],
    "Training": [
        "docs/training",
        "docs/loops",
        "docs/budgets",
        "docs/layers",
        "docs/linear_models",
        "docs/coming-from",
    ],
    "Running": [
        "docs/deployment",
        "docs/inference",
        "docs/compaction",
        "docs/format",
    ],
    "The method and its evidence": [
        "docs/method",
        "docs/results",
        "experiments/README",
        "docs/training-cost",
        "docs/reliability",
        "docs/limits",
    ],
    "Reference": [
        "docs/api/sparsevd",
        "docs/api/linear_model",
        "docs/api/integrations",
        "docs/api/baselines",
        "docs/api/zoo",
        "docs/api/posterior",
        "CONTRIBUTING",
    ],
}


def toctrees() -> str:
    parts = []
    for caption, pages in NAVIGATION.items():
        lines = [f"/{page}" for page in pages]
        parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```"]))
    return "\n\n".join(parts)


def append(app: Sphinx, page: str, source: list[str]) -> None:
    if page == FIRST_PAGE:
        source[0] += "\n\n" + toctrees() + "\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", append)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
