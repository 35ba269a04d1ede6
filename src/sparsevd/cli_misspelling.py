"""What was probably meant by an option or a command that does not exist: a near miss, or what others call it."""

import difflib
from collections.abc import Collection, Iterable, Mapping

# What other tools call it: the first of these that the command has is suggested.
OPTIONS: dict[str, tuple[str, ...]] = {
    "--arch": ("--model", "--net"),
    "--batch": ("--batch-size",),
    "--batch-size": ("--batch",),
    "--batchsize": ("--batch-size", "--batch"),
    "--bs": ("--batch-size", "--batch"),
    "--checkpoint": ("--init-from",),
    "--data-path": ("--data-dir",),
    "--dataset": ("--data",),
    "--distill": ("--teacher",),
    "--format": ("--to",),
    "--learning-rates": ("--learning-rate",),
    "--lr": ("--learning-rate",),
    "--max-drop": ("--max-error-increase",),
    "--model": ("--net",),
    "--net": ("--model",),
    "--network": ("--model", "--net"),
    "--num-epochs": ("--epochs",),
    "--num-threads": ("--threads",),
    "--out": ("--output",),
    "--out-dir": ("--out", "--output"),
    "--output": ("--out",),
    "--output-dir": ("--out", "--output"),
    "--pretrained": ("--init-from", "--pretrain-epochs"),
    "--pruning-ratio": ("--sparsity",),
    "--resume-from": ("--resume",),
    "--root": ("--data-dir",),
    "--validation": ("--val-size",),
    "--wd": ("--pretrain-weight-decay",),
    "--weight-decay": ("--pretrain-weight-decay",),
    "--weights": ("--init-from",),
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "accelerate": ("bench",),
    "benchmark": ("bench",),
    "check": ("doctor",),
    "convert": ("export",),
    "eval": ("info",),
    "evaluate": ("info",),
    "fit": ("train",),
    "pack": ("compress",),
    "quantise": ("compress",),
    "quantize": ("compress",),
    "run": ("train",),
    "show": ("info",),
    "summary": ("info",),
    "sparsify": ("train",),
    "version": ("doctor",),
}
_ON_THE_CPU = "The commands compute on the CPU; in Python, sparsevd.fit trains where the model is"
_THREADS = "The number of threads is OMP_NUM_THREADS in the environment"
# What no command has, and what to do instead.
NOWHERE: dict[str, str] = {
    "--cpu": _ON_THE_CPU,
    "--cuda": _ON_THE_CPU,
    "--device": _ON_THE_CPU,
    "--gpu": _ON_THE_CPU,
    "--num-threads": _THREADS,
    "--threads": _THREADS,
}


def meant(typed: str, present: Iterable[str], synonyms: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The names that were probably meant, the likeliest first; none if nothing is near."""
    names = [name for name in present if name != "--help"]
    typed = typed.lower().replace("_", "-")
    if typed in names:  # --Batch_Size
        return [typed]
    known = [name for name in synonyms.get(typed, ()) if name in names]
    if known:
        return known[:1]
    begun = [name for name in names if len(typed.lstrip("-")) > 2 and name.startswith(typed)]
    return begun or difflib.get_close_matches(typed, names, n=2, cutoff=0.7)


def about_option(typed: str, present: Collection[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    """A sentence on an option that a command does not have; `elsewhere` has the options of the others."""
    likely = meant(typed, present, OPTIONS)
    if likely:
        return f"Did you mean {' or '.join(likely)}?"
    if typed in NOWHERE:
        return f"{NOWHERE[typed]}."
    having = [command for command, options in elsewhere.items() if typed in options]
    return f"It is an option of {' and '.join(having)}." if having else ""


def about_command(typed: str, present: Iterable[str]) -> str:
    """A sentence on a command that does not exist."""
    names = list(present)
    likely = meant(typed, names, COMMANDS)
    return f"Did you mean {' or '.join(likely)}?" if likely else f"There are {', '.join(names)}."
