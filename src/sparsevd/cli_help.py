"""Commands that show their options in groups, and suggest what was meant by one that does not exist.

Plain text, not rich's panels: in a log or a pipe, which have no width, those cut off what does not fit.
"""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sparsevd import cli_misspelling

# An option has one name and one meaning in all commands, so one list serves all of them.
GROUPS = {
    "Network and data": "model net data data_dir val_size shift mirror input_shape init_from",
    "Training": "recipe methods epochs batch_size learning_rate decay held adam_beta2 pretrain_epochs "
    "pretrain_learning_rate pretrain_weight_decay polish",
    "Noise": "log_sigma2_lr_ratio late_log_sigma2_lr_ratio late_from warm_up_start warm_up_end",
    "What is dropped": "threshold drop_patience drop_from",
    "Budget": "sparsity max_error_increase max_bytes noise",
    "Teacher": "teacher temperature teacher_weight",
    "Format": "to precision smaller sparse_initializers",
    "Timing": "time batch compiler",
    "Files and machine": "out output resume overwrite seed threads contract channels_last autocast variance_dtype "
    "as_json cards",
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
_OTHERS = "Options"

# The commands on the first page, by what they are for.
COMMANDS = {
    "Train": "train compare",
    "Look": "info report bench doctor",
    "Deliver": "prune compress export",
}
_COMMAND_GROUP_OF = {name: group for group, names in COMMANDS.items() for name in names.split()}
_OTHER_COMMANDS = "Commands"

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of click, or of the copy of it inside typer


def group_of(option: str) -> str:
    """Where the help shows an option, by the name of its parameter."""
    return _GROUP_OF.get(option, _OTHERS)


class Command(TyperCommand):
    """A command whose options are shown in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{group: [] for group in GROUPS}, _OTHERS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                sections["Arguments" if argument else group_of(parameter.name or "")].append(record)
        _write(formatter, sections)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            typed = getattr(error, "option_name", "")
            if type(error).__name__ == "NoSuchOption" and typed.startswith("--"):
                present = {name for parameter in self.get_params(ctx) for name in parameter.opts}
                suggestion = cli_misspelling.about_option(typed, present, _options_elsewhere(ctx))
                error.message = f"No such option: {typed}. {suggestion}".rstrip()  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


class CommandGroup(TyperGroup):
    """All commands, in groups by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {group: [] for group in (*COMMANDS, _OTHER_COMMANDS)}
        for name, command in self.commands.items():
            sections[_COMMAND_GROUP_OF.get(name, _OTHER_COMMANDS)].append((name, command.get_short_help_str(200)))
        _write(formatter, sections)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if args and not args[0].startswith("-"):
                suggestion = cli_misspelling.about_command(args[0], self.commands)
                error.message = f"No such command {args[0]!r}. {suggestion}"  # type: ignore[attr-defined]
            raise


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def _options_elsewhere(ctx: Any) -> dict[str, set[str]]:
    """The options of the other commands, by command."""
    commands = ctx.parent.command.commands if ctx.parent else {}
    return {
        f"sparsevd {name}": {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
        if command is not ctx.command
    }
