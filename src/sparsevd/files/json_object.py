"""A JSON object that comes from a file, read whole or refused in a sentence; and one that is printed."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from sparsevd.errors import FormatError

# More than any run.json or summary.json: a line per layer is some 200 bytes.
LARGEST = 50_000_000


def parse(text: str | bytes, source: str, error: type[FormatError] = FormatError) -> dict[str, Any]:
    """The object that the text holds; `source` begins the sentence of the error."""
    try:
        value = json.loads(text)
    except ValueError as problem:  # also bytes that are no text, and integers of thousands of digits
        raise error(f"{source} is not JSON ({problem}); use a backup of it, or remove it") from problem
    except RecursionError as problem:
        raise error(
            f"{source} is not JSON that sparsevd writes: it is nested too deeply; use a backup of it, or remove it"
        ) from problem
    if not isinstance(value, dict):
        raise error(
            f"{source} holds a JSON {type(value).__name__} instead of an object; use a backup of it, or remove it"
        )
    return value


def read(path: Path, error: type[FormatError] = FormatError) -> dict[str, Any]:
    """The object that a file holds."""
    return read_owned(path, error)[0]


def read_owned(path: Path, error: type[FormatError] = FormatError) -> tuple[dict[str, Any], bool]:
    """The object, and whether nobody but the present user can have written it: asked of the file that is open."""
    try:
        with path.open("rb") as file:
            owned = _owned(os.fstat(file.fileno()))
            content = file.read(LARGEST + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem})") from problem
    if len(content) > LARGEST:
        raise error(f"{path} has more than {LARGEST:,} bytes, which sparsevd never writes")
    return parse(content, str(path), error), owned


def _owned(status: os.stat_result) -> bool:
    user = getattr(os, "getuid", None)  # Windows has none
    return user is None or (status.st_uid == user() and not status.st_mode & stat.S_IWOTH)


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether this is an integer, and no truth value, from low to high."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def shown(value: object) -> str:
    """A value as it stands in a sentence: it may be long, or nested too deeply for repr."""
    return repr(value)[:80] if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def text(value: dict[str, Any]) -> str:
    """An object to print: numbers that JSON does not have, such as infinity, are null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
