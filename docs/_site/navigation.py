"""The site's table of contents. A new page needs a line here; `tests/test_documents.py` says so if it is missing.

It is put below the first page when the site is built, so that this page stays readable on a forge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tests read this file without Sphinx
    from sphinx.application import Sphinx

FIRST_PAGE = "docs/index"

NAVIGATION = {
    "Start": {
        "docs/install": "Install",
    },
    "Tutorials": {
        "docs/tutorials/sparsify-your-model": "Sparsify your model",
        "docs/tutorials/keep-to-a-budget": "Keep to a budget",
        "docs/tutorials/your-own-loop": "Your own loop",
        "docs/tutorials/ship-it": "Ship it",
    },
    "Training": {
        "docs/training": "Training",
        "docs/loops": "Loops and trainers",
        "docs/budgets": "Budgets",
        "docs/report": "The report",
        "docs/layers": "Layers",
        "docs/linear_models": "Linear models",
        "docs/coming-from": "Coming from another library",
    },
    "Running": {
        "docs/deployment": "What runtimes do with zeros",
        "docs/inference": "Faster on a CPU",
        "docs/compaction": "Fewer units, and ONNX",
        "docs/format": "The model file",
    },
    "The method and its evidence": {
        "docs/method": "The method",
        "docs/results": "Results",
        "docs/text": "Texts",
        "experiments/README": "The paper's claims",
        "docs/training-cost": "Cost of training",
        "docs/reliability": "Reliability",
        "docs/limits": "Limits",
    },
    "Reference": {
        "docs/api/sparsevd": "sparsevd",
        "docs/api/linear_model": "sparsevd.linear_model",
        "docs/api/integrations": "sparsevd.integrations",
        "docs/api/baselines": "sparsevd.baselines",
        "docs/api/zoo": "sparsevd.zoo",
        "docs/api/posterior": "sparsevd.posterior",
        "CONTRIBUTING": "Contributing",
        "CHANGELOG": "Changes",
        "SECURITY": "Security",
    },
}


def toctrees() -> str:
    parts = []
    for caption, pages in NAVIGATION.items():
        lines = [f"{title} </{page}>" for page, title in pages.items()]
        parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```"]))
    return "\n\n".join(parts)


def append(app: Sphinx, page: str, source: list[str]) -> None:
    if page == FIRST_PAGE:
        source[0] += "\n\n" + toctrees() + "\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", append)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
