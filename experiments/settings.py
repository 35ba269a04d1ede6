"""Trials of settings, on held-out training data: which there are records of, and which was best."""

from typing import Any

from records import Records


def picked(settings: tuple[Any, ...], numbers: list[int]) -> list[Any]:
    """Those with these numbers, from 0; without any, all."""
    return [setting for number, setting in enumerate(settings) if not numbers or number in numbers]


def untried(settings: list[Any], records: Records, **of: Any) -> list[Any]:
    """Those without a record; what came to a setting later has its default in earlier records."""
    tried = [record["setting"] for record in records.find(kind="trial", **of)]
    return [setting for setting in settings if setting not in [type(setting)(**each) for each in tried]]


def best(records: Records, method: str, **of: Any) -> dict[str, Any]:
    """The setting with the lowest held-out error; of Sparse VD the sparsest within a point of the best dense one."""
    found = records.find(kind="trial", method=method, **of)
    if not found:
        raise SystemExit(f"no trials of {method} yet: the action `trials` makes them")
    lowest = min(found, key=lambda record: record["error"])
    if method == "sparse":
        limit = min(record["error"] for record in records.find(kind="trial", method="dense", **of)) + 1
        within = [record for record in found if record["error"] <= limit]
        lowest = max(within, key=lambda record: record["ratio"]) if within else lowest
    return lowest["setting"]  # type: ignore[no-any-return]
