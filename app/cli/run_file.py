"""Reads a run's options from a file: a YAML mapping whose keys are the names of the command's options.

The keys come from the command's parameters, so a new option is a key at once. The command line overrides the file.
"""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from app.errors import OptionInvalid, UnknownName

_NOT_KEYS = frozenset({"config", "dry_run", "help", "json"})
"""Options that control what is done with a run, and do not describe it."""


def _key(parameter: Any) -> str:
    """Returns the key of a parameter: `max-steps` for `--max-steps`."""
    long = [option for option in parameter.opts if option.startswith("--")]
    return long[0][2:] if long else str(parameter.name)


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's values the command's defaults. Raises: OptionInvalid."""
    if path is None or context.resilient_parsing:
        return path
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionInvalid(f"{path}: expected a YAML file, found: {error}") from error
    if not isinstance(given, dict):
        raise OptionInvalid(f"{path}: expected a mapping of options, such as `agent: oracle`; found {given!r:.60}")
    keys = {_key(parameter): parameter for parameter in context.command.params if parameter.name not in _NOT_KEYS}
    values = {}
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name not in keys:
            raise UnknownName(f"{path}: {UnknownName.of('option', name, list(keys))}")
        values[keys[name].name] = _value(f"{path}: {name}", value, keys[name])
    context.default_map = {**(context.default_map or {}), **values}
    return path


def _value(where: str, value: Any, parameter: Any) -> Any:
    if isinstance(value, date) and not isinstance(value, datetime):  # YAML reads 2024-05-31 as a date
        return value.isoformat()
    several = getattr(parameter, "multiple", False) or getattr(parameter, "nargs", 1) == -1
    if several and not isinstance(value, list):
        value = [value]
    for one in value if several else [value]:
        if isinstance(one, bool) != bool(getattr(parameter, "is_flag", False)):
            expected = "true or false" if getattr(parameter, "is_flag", False) else "a value"
            raise OptionInvalid(f"{where}: expected {expected}, found {one!r}; a text such as 'yes' needs quotes")
        if one is None or isinstance(one, list | dict):
            raise OptionInvalid(f"{where}: expected one value, found {one!r}")
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        is_eager=True,
        callback=_read,
        help="A YAML file of this command's options, such as `max-steps: 30`; the command line overrides it.",
    ),
]
