"""Options of the command line from the settings of the library: a field of a dataclass with a help text is an option.

    epochs: Annotated[int, "Passes over the training set."] = 40

is `--epochs INTEGER  Passes over the training set.  [default: 40]`, and in an error of the library "epochs=0" is
"--epochs 0" for whoever typed it.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

_Function = TypeVar("_Function", bound=Callable[..., None])
_Config = TypeVar("_Config")

# In a sentence: a setting with its value, one that is switched on, or one that is only named.
_SETTING = re.compile(r"(?<![\w./-])([a-z]\w*)=(True\b|(?=[\s,;)]|$))?")


def options_from(config: type) -> Callable[[_Function], _Function]:
    """Give a command that takes **settings an option for each of them, behind the parameters that it names itself."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        function.__signature__ = signature.replace(parameters=[*named, *_parameters(config)])  # type: ignore[attr-defined]
        return function

    return decorate


def _parameters(config: type) -> Iterator[inspect.Parameter]:
    types = get_type_hints(config, include_extras=True)
    for field in fields(config):
        kind = types[field.name]
        if is_dataclass(kind):
            yield from _parameters(kind)  # type: ignore[arg-type]
        elif get_origin(kind) is Annotated:
            plain, text = get_args(kind)
            # What is off is only ever switched on: there is no --no-mirror.
            names = [f"--{field.name.replace('_', '-')}"] if plain is bool and field.default is False else []
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=Annotated[plain, typer.Option(*names, help=text)],
            )


def given(context: typer.Context) -> dict[str, Any]:
    """What was typed, even if it is the default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def changed(config: _Config, values: Mapping[str, Any]) -> _Config:
    """The settings with other values, also of those within them."""
    found: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]
        present = getattr(config, field.name)
        if is_dataclass(present):
            found[field.name] = changed(present, values)
        elif field.name in values:
            found[field.name] = values[field.name]
    return replace(config, **found)  # type: ignore[type-var]


def in_options(sentence: str, app: typer.Typer) -> str:
    """A sentence of the library as the command line says it: with options in the place of arguments."""
    options: dict[str, str] = {
        parameter.name: parameter.opts[0]
        for command in typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
        for parameter in command.params
        if parameter.param_type_name == "option"
    }

    def option(match: re.Match[str]) -> str:
        if match[1] not in options:
            return match[0]
        return options[match[1]] + (" " if match[2] is None else "")

    return _SETTING.sub(option, sentence)
