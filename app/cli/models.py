"""Commands about models: `megaflow models list | add | drain | resume | remove | swap | publish`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError

from app.cli.show import Json, as_json, console, listing, say
from app.client import MegaFlow
from app.errors import LimitInvalid, explained
from app.ledger import model_replicas as ledger
from app.ledger.model_replicas import ModelReplica, NewReplica
from app.model_service import publishing
from app.model_service.checking import check_engine
from app.models.engines import EngineKind
from app.models.model_calls import Dialect
from app.models.publication import OnNewWeights, ProbeSequence
from app.models.spec import ModelChoice

Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="Stable name of the model, or * for all that are not listed.")
]
Engine = Annotated[
    str | None, typer.Argument(metavar="[URL]", help="URL of one of its inference servers; default: all.")
]

models = typer.Typer(help="Models and the inference servers that serve them.", no_args_is_help=True)

_SAYS = {"chat": Dialect.CHAT, "responses": Dialect.RESPONSES, "messages": Dialect.MESSAGES}


_COLUMNS: dict[str, Callable[[ModelReplica], str]] = {
    "model": lambda one: one.model,
    "engine": lambda one: one.url,
    "its name there": lambda one: one.upstream_model or "",
    "version": lambda one: one.policy_version,
    "speaks": lambda one: ", ".join(name for name, one_of in _SAYS.items() if one_of in one.dialects) or "found out",
    "key": lambda one: one.api_key_env or "",
    "server": lambda one: one.engine,
    "context": lambda one: "" if one.context_tokens is None else f"{one.context_tokens:,}",
    "state": lambda one: one.state,
}


@models.command(name="list")
def list_models(json: Json = False) -> None:
    """List the inference servers of all models. A model that is not listed uses the endpoint of the settings."""
    with MegaFlow() as flow, flow.database.begin() as connection:
        listing(ledger.listed(connection), _COLUMNS, json=json)


@models.command()
def add(
    model: Name,
    url: Annotated[str, typer.Argument(metavar="URL", help="OpenAI-compatible base URL, with /v1.")],
    upstream_model: Annotated[str | None, typer.Option("--as", help="Name of the model at that server.")] = None,
    version: Annotated[str, typer.Option(help="Policy version, recorded with every call.")] = "",
    speaks: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(_SAYS)}; may be repeated. Default: the gateway detects it.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Variable of the gateway with the key; the key is sent to this URL only.")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer; default: the server's.")
    ] = None,
    engine: Annotated[
        Literal["vllm", "sglang", "transformers", "replay", "openai"] | None,
        typer.Option(help="Kind of the server; default: detected."),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Add it without a check, e.g. before it starts.")
    ] = False,
    json: Json = False,
) -> None:
    """Add an inference server for a model, and allow its key to be sent there. In force within a second."""
    new = NewReplica(
        model=model,
        url=url,
        upstream_model=upstream_model,
        policy_version=version,
        dialects=tuple(dict.fromkeys(_dialect(one) for one in speaks or ())),
        api_key_env=api_key_env,
        context_tokens=context_tokens,
        engine=EngineKind(engine or ""),
    )
    with MegaFlow() as flow:
        ledger.check_new(new)
        if not no_check:
            new = _checked(flow, new)
        replica = ledger.add(flow.database, new)
    _say([replica], "was added unseen" if no_check else "answers", json)


@models.command()
def drain(model: Name, url: Engine = None, json: Json = False) -> None:
    """Send no new attempts to an inference server. Attempts that use it stay until they end."""
    with MegaFlow() as flow:
        changed = ledger.drain(flow.database, model, url)
    _say(changed, "takes no new attempts", json)


@models.command()
def resume(model: Name, url: Engine = None, json: Json = False) -> None:
    """Send new attempts to a drained inference server again."""
    with MegaFlow() as flow:
        changed = ledger.resume(flow.database, model, url)
    _say(changed, "takes new attempts", json)


@models.command()
def remove(model: Name, url: Engine = None, json: Json = False) -> None:
    """Remove an inference server. Its attempts go on at another one, or at the endpoint of the settings."""
    with MegaFlow() as flow:
        removed = ledger.remove(flow.database, model, url)
    _say(removed, "is gone", json)


@models.command()
def swap(
    model: Name,
    version: Annotated[str, typer.Option(help="Name of the new version.")],
    upstream_model: Annotated[str | None, typer.Option("--as", help="Name of the new version at its servers.")] = None,
    json: Json = False,
) -> None:
    """Switch a model's name to another version, on all its inference servers at once."""
    with MegaFlow() as flow:
        now = ledger.swap(flow.database, model, policy_version=version, upstream_model=upstream_model)
    _say(now, "is there", json)


@models.command()
def publish(
    model: Name,
    version: Annotated[str, typer.Option(help="Name of the new version.")],
    weights: Annotated[
        str | None, typer.Argument(metavar="[WEIGHTS]", help="Path or URL that servers load; default: they have it.")
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="JSON file: 32 or more token_ids, and their logprobs in the new version.")
    ] = None,
    on_new_weights: Annotated[
        OnNewWeights, typer.Option(help="What happens to running calls; new calls wait.")
    ] = OnNewWeights.FINISH,
    unverified: Annotated[bool, typer.Option("--unverified", help="Publish without a probe.")] = False,
    json: Json = False,
) -> None:
    """Update a model's servers to a version, verify it with a probe and switch to it; else keep the old version."""
    sequence = None if probe is None else _probe(probe)
    with MegaFlow() as flow:
        now = publishing.publish(
            flow.settings, flow.database, model, version, weights, sequence, on_new_weights, unverified=unverified
        )
    if unverified:
        say(f"version {version} of {model} was not verified")
    _say(now, "is live", json)


def _probe(path: Path) -> ProbeSequence:
    """Raises: LimitInvalid."""
    try:
        return ProbeSequence.model_validate_json(path.read_bytes())
    except OSError as error:
        raise LimitInvalid(f"--probe {path}: expected a file, found: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"][:2])) or "the file"
        raise LimitInvalid(f"--probe {path}: {where}: {explained(first)}; nothing was changed") from error


def _checked(flow: MegaFlow, new: NewReplica) -> NewReplica:
    """Has the gateway check the server and detect its kind. Raises: ModelEndpointUnavailable: nothing was changed."""
    candidate = {
        "url": new.url,
        "api_key_env": new.api_key_env,
        "upstream_model": new.upstream_model,
        "dialects": [dialect.value for dialect in new.dialects],
        "engine": new.engine.value,
    }
    warnings, engine = check_engine(flow.settings, flow.database, ModelChoice(name=new.model), candidate)
    for warning in warnings:
        say(warning)
    return replace(new, engine=new.engine or engine)


def _say(replicas: list[ModelReplica], what: str, json: bool) -> None:
    if json:
        as_json(replicas)
        return
    for one in replicas:
        version = f" (version {one.policy_version})" if one.policy_version else ""
        state = " draining" if one.state == ledger.DRAINING and what == "is there" else ""
        console.print(f"{one.model}: {one.url}{version} {what}{state}", soft_wrap=True)


def _dialect(said: str) -> Dialect:
    if said in _SAYS:
        return _SAYS[said]
    raise LimitInvalid(f"--speaks: expected one of {', '.join(_SAYS)}, found {said!r}; nothing was changed")
