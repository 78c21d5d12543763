"""Which URLs and keys a submission may name: a key goes only to the URLs that were registered with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from app.ledger.model_replicas import ModelReplica
from app.models.addresses import forbidden_url, normal_url
from app.models.spec import ModelChoice
from app.settings import Settings

_NAME_MOST = 60


@dataclass(frozen=True, slots=True)
class Registered:
    """Base URLs of engines, each with the variables of the keys that it may get."""

    pairs: frozenset[tuple[str, str | None]]
    shared: bool

    @classmethod
    def of(cls, settings: Settings, rows: Iterable[ModelReplica]) -> Registered:
        """What `megaflow models add` and the settings have registered."""
        pairs = {(normal_url(row.url), row.api_key_env) for row in rows}
        if settings.model_base_url is not None:
            pairs.add((normal_url(settings.model_base_url), settings.model_api_key_env))
        return cls(frozenset(pairs), settings.shared_installation)

    def refusal(self, model: ModelChoice, url: str) -> str | None:
        """Why this model may not be called at `url`, with the command that would allow it; None: it may.

        url: `model.base_url`, or that of the settings.
        """
        url = normal_url(url)
        if (why := forbidden_url(url)) is not None:
            return f"{url}: expected a model server, found {why}; models are never called there"
        key = model.api_key_env
        if key is not None and (url, key) not in self.pairs:
            return (
                f"the key {_shown(key)} is not registered for {url}: a key goes only to URLs that were registered"
                f" with it; expected a registered pair; try `{_command(model.name, url, key)}`"
            )
        if self.shared and url not in {one for one, _ in self.pairs}:
            return (
                f"{url} is not registered: a shared installation (MEGAFLOW_SHARED_INSTALLATION) calls registered URLs"
                f" only; its administrator may run `{_command(model.name, url, None)}`"
            )
        return None


def _shown(variable: str) -> str:
    """The name of a variable, unless it could be a key itself."""
    plain = len(variable) <= _NAME_MOST and variable.isidentifier() and variable.isupper()
    return variable if plain else "VAR"


def _command(model: str, url: str, variable: str | None) -> str:
    key = "" if variable is None else f" --api-key-env {_shown(variable)}"
    return f"megaflow models add {shlex.quote(model)} {shlex.quote(url)}{key}"
