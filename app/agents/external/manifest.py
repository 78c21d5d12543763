"""Reads the TOML manifest of an agent whose adapter lives outside this repository. Producers use it too."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.agents.framework import Placement
from app.errors import SettingsInvalid, explained
from app.models.model_calls import Dialect

PROTOCOL = "megaflow-agent/1"
PROTOCOLS = (PROTOCOL,)
"""Protocol versions that this MegaFlow supports."""

TOOL = "{tool}"
"""Placeholder in a manifest's arguments for the adapter's folder, as seen from where the argument is used."""

_LONGEST_MANIFEST_BYTES = 1 << 20

Argument = Annotated[str, Field(pattern=r"^[^\x00]+$")]
_DIALECTS: Mapping[str, Dialect] = {dialect.name.lower(): dialect for dialect in Dialect}


class Manifest(BaseModel):
    """Description of an external agent, known before it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    protocol: str
    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,39}$")
    version: str = Field(min_length=1, max_length=80)
    summary: str = Field(default="", max_length=200)
    argv: tuple[Argument, ...] = Field(min_length=1)
    placement: Placement = Placement.OUTSIDE
    needs_model: bool = True
    writes: bool = True
    """False: it changes only files below /tmp, and so may share a read-only environment."""
    dialect: Literal["chat", "responses", "messages"] = "chat"
    bundle: str = "."
    """The adapter's folder, relative to the manifest; mounted when it runs inside. Not used with `install`."""
    install: tuple[Argument, ...] = ()
    """Command run once per host, in the manifest's folder; `{tool}` is an empty folder to fill. Replaces `bundle`."""
    file: Path
    """Path of the manifest; not one of its keys."""

    @field_validator("protocol")
    @classmethod
    def _spoken(cls, value: str) -> str:
        if value not in PROTOCOLS:
            raise ValueError(f"expected a protocol of this MegaFlow ({', '.join(PROTOCOLS)}), found {value!r}")
        return value

    @model_validator(mode="after")
    def _bundle_is_there(self) -> Manifest:
        if self.install:
            if self.bundle != ".":
                raise ValueError("expected `bundle` or `install`, found both")
        elif not self.folder.is_dir():
            raise ValueError(f"expected the folder {self.bundle!r} beside the manifest, found none")
        if self.placement is Placement.INSIDE and not any(TOOL in word for word in self.argv):
            raise ValueError(f"expected {TOOL} in `argv`: inside, the adapter stands at another path than here")
        return self

    @property
    def folder(self) -> Path:
        """The adapter's folder, when nothing has to be installed."""
        return (self.file.parent / self.bundle).absolute()

    @property
    def speaks(self) -> Dialect:
        return _DIALECTS[self.dialect]


def read(file: Path) -> Manifest:
    """Raises: SettingsInvalid: no such file, no TOML, or a wrong key; with what was expected and found."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_LONGEST_MANIFEST_BYTES + 1)
        if len(content) > _LONGEST_MANIFEST_BYTES:
            raise SettingsInvalid(f"{file}: expected a manifest of at most {_LONGEST_MANIFEST_BYTES} bytes; found more")
        table = tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsInvalid(f"{file}: expected the manifest of an agent, in TOML; found {error}") from error
    if "file" in table:
        raise SettingsInvalid(f"{file}: unknown key 'file'; docs/howto/agents.md lists the keys of a manifest")
    try:
        return Manifest.model_validate({**table, "file": file.absolute()})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'manifest'}: {explained(e)}" for e in error.errors())
        raise SettingsInvalid(f"{file}: {faults}; docs/howto/agents.md lists the keys of a manifest") from error


def read_all(files: Iterable[Path], *, taken: Iterable[str] = ()) -> dict[str, Manifest]:
    """Reads manifests by name. Raises: SettingsInvalid: as `read`, or a name occurs twice or in `taken`."""
    manifests: dict[str, Manifest] = {}
    for file in files:
        manifest = read(file)
        if manifest.name in set(taken):
            raise SettingsInvalid(f"{file}: expected a name of its own; found {manifest.name!r}, which MegaFlow uses")
        if (other := manifests.get(manifest.name)) is not None:
            raise SettingsInvalid(f"{file}: expected a name of its own; found {manifest.name!r}, as in {other.file}")
        manifests[manifest.name] = manifest
    return manifests
