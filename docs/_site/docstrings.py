"""Docstrings here are plain text with `names` and indented examples; Sphinx wants reStructuredText.

In that language |, * and a trailing _ mean something, a single backtick is a link, and an indented example needs a
mark. So prose is escaped, `names` become links to what they name, and examples are marked as Python. A default that is
written once, under a name, is shown with its value.
"""

import re
import sys
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import get_type_hints

from sphinx.application import Sphinx

NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*(\(\))?")
CARD = re.compile(r"(Suggested settings|Known negatives|Departs from \w+ \w+):")


def code(match: re.Match[str]) -> str:
    text = match[1]
    return f":py:obj:`{text}`" if NAME.fullmatch(text) else f"``{text}``"


def prose(line: str) -> str:
    """Escaped, but for what stands between backticks."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(
        re.sub("`([^`]+)`", code, part) if part.startswith("`") else re.sub(r"([*|]|_(?=\W|$))", r"\\\1", part)
        for part in parts
    )


def in_paragraphs(lines: list[str]) -> list[str]:
    """A card's parts stand in lines of their own; a page wants paragraphs."""
    return [part for line in lines for part in (["", line] if CARD.match(line) else [line])]


def attributes(lines: list[str]) -> list[str]:
    """A list of what a fitted estimator has: `coef_ : θ` says what it is, not its type."""
    found = [".. rubric:: Attributes", ""]
    for line in lines:
        if line.startswith(" "):
            found.append(f"  {prose(line.strip())}")
            continue
        names, colon, about = line.partition(" : ")
        quoted = ", ".join(f"``{name}``" for name in names.split(", "))
        found.append(f"- {quoted}: {prose(about)}" if colon else f"- {quoted}")
    return found


def translated(lines: list[str]) -> list[str]:
    """An indented paragraph that no section (`Args:`) owns is an example, or a formula."""
    found: list[str] = []
    section = ""
    for empty, group in groupby(in_paragraphs(lines), key=lambda line: not line.strip()):
        paragraph = list(group)
        heading = re.fullmatch(r"([A-Z]\w+):?", paragraph[0])
        underlined = len(paragraph) > 1 and set(paragraph[1]) == {"-"}
        if empty:
            found += paragraph
        elif heading and (underlined or paragraph[0].endswith(":")):
            section = heading[1]
            head, rest = paragraph[: 1 + underlined], paragraph[1 + underlined :]
            if section == "Attributes" and underlined:
                found += attributes(rest)
            else:
                found += head + (rest if section == "Examples" else [prose(line) for line in rest])
        elif section == "Examples" or paragraph[0].startswith(">>>"):
            found += paragraph
        elif paragraph[0].startswith("    ") and not section:
            is_code = any(re.search(r"sparsevd\.|torch\.|[\w.]+ = \w|\w\(", line) for line in paragraph)
            found += [f".. code-block:: {'python' if is_code else 'text'}", "", *paragraph]
        else:
            section = section if paragraph[0].startswith(" ") else ""
            found += [prose(line) for line in paragraph]
    return found


def settings(thing: object) -> list[str]:
    """The fields of a dataclass whose types carry a sentence, as those of `FitConfig` do."""
    if not (isinstance(thing, type) and is_dataclass(thing)):
        return []
    hints = get_type_hints(thing, include_extras=True)
    told = {each.name: getattr(hints[each.name], "__metadata__", ()) for each in fields(thing)}
    lines = [f"    {name}: {words[0]}" for name, words in told.items() if words and isinstance(words[0], str)]
    return ["", "Args:", *lines, ""] if lines else []


def process(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = translated([*lines, *settings(thing)])


def show_values(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    module = sys.modules.get(getattr(thing, "__module__", ""))

    def value(match: re.Match[str]) -> str:
        found = getattr(module, match[1], None)
        return f"={found!r}" if isinstance(found, float | int | str) else match[0]

    return signature and re.sub(r"=([A-Z][A-Z0-9_]+)\b", value, signature), result


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon reads the sections
    app.connect("autodoc-process-signature", show_values)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
