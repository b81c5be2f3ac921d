"""The settings of a server as flags of a command."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .settings import FIELDS, Settings, flag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


def command(run: Callable[..., None], more: Sequence[inspect.Parameter] = (), without: Collection[str] = ()) -> Any:
    """A function with a flag for each field of the settings class, which calls ``run`` with what was given.

    Args:
        run: Gets every flag by name: fields of the settings, ``config``, ``show_config``, and ``more``.
        more: Flags before these.
        without: Fields that are no flags of this command.
    """

    def made(**given: Any) -> None:
        run(**given)

    parameters = [
        parameter("models", list[str] | None, typer.Argument(metavar="[NAME=]MODEL...", show_default=False)),
        *more,
        parameter("config", Path | None, typer.Option("--config", help="TOML file of settings.")),
        parameter(
            "show_config", bool, typer.Option("--show-config", help="Print the settings and stop."), default=False
        ),
    ]
    parameters += [_flag(name) for name in FIELDS if name != "models" and name not in without]
    signature = inspect.Signature(parameters, return_annotation=None)
    made.__signature__ = signature  # type: ignore[attr-defined]
    made.__annotations__ = {p.name: p.annotation for p in parameters}
    return made


def given_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Those of the flags that were given, as :func:`.settings.load` takes them."""
    return {name: value for name, value in given.items() if value not in (None, (), [])}


def parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """A flag or an argument of a command that is put together."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _flag(name: str) -> inspect.Parameter:
    field = Settings.model_fields[name]
    default = field.get_default()
    note = "" if default in (None, (), False) else f" [default: {_spell(default)}]"
    kind: Any
    flags = [flag_of(name)]
    if field.annotation is bool:
        kind, flags = bool | None, [f"{flags[0]}/--no-{flags[0].removeprefix('--')}"]
    elif isinstance(default, tuple):
        kind = list[str] | None
    else:
        # Values are checked by the settings class, which speaks of all sources in one way.
        kind = str | None
    option = typer.Option(*flags, help=f"{field.description}{note}", show_default=False, metavar=_metavar(kind, name))
    return parameter(name, kind, option)


def _metavar(kind: Any, name: str) -> str | None:
    if kind == bool | None:
        return None
    return name.rpartition("_")[2].upper()


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
