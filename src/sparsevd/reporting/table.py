"""Tables for the terminal and for logs: plain text, as wide as what is in them, never cut off.

Not rich's: in a log, which has no width, it folds at 80 columns what does not fit.
"""

from collections.abc import Container, Sequence


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Container[int] = (),
    total: Sequence[str] | None = None,
) -> str:
    """Rows under a header and a rule, and the total under another; the columns in `right` are those of numbers."""
    every = [header, *rows, *([total] if total else [])]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    lines = [line(row) for row in every]
    rule = "─" * max(map(len, lines))
    lines.insert(1, rule)
    if total:
        lines.insert(-1, rule)
    return "\n".join(lines)
