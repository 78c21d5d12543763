"""Options that `megaflow submit` and `megaflow schedule add` have in common: what runs, where, on whose account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from app.cli.show import say
from app.errors import SpecInvalid
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.spec import MOST_PRIORITY, MOST_WAIT_S, EnvironmentKind, Mode, ModelChoice, Network, Reuse, Sampling

if TYPE_CHECKING:
    from app.client import MegaFlow

AgentOption = Annotated[
    str,
    typer.Option(
        "--agent", "-a", help="A name of `megaflow agents list`, several with commas between, or `all` frameworks."
    ),
]
AgentArgOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE", help="For the agent's adapter; may be repeated. `megaflow agents list` has the keys."
    ),
]
ModeOption = Annotated[Mode, typer.Option(help="Where to run.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Name at the endpoint or of a route; `replay` or `replay:RUN`: scripted."),
]
BaseUrlOption = Annotated[str | None, typer.Option(help="OpenAI-compatible base URL; default: the settings'.")]
ApiKeyEnvOption = Annotated[
    str | None, typer.Option(help="Variable of the key, registered with the URL by `megaflow models add`.")
]
SideModelOption = Annotated[
    list[str] | None, typer.Option(help="Another model that the agent may call; may be repeated.")
]
NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Do not have the gateway check the model's endpoint and key first.")
]
TemperatureOption = Annotated[float | None, typer.Option(min=0, max=2, help="Of the model, whatever the agent asks.")]
TopPOption = Annotated[float | None, typer.Option(help="Of the model, above 0 and up to 1, whatever the agent asks.")]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of one answer, sent with every call instead of the agent's own.")
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Of the model's sampling, where its API has one.")]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", "-n", min=1, help="The most attempts of this run at once.")
]
ReplicasOption = Annotated[int, typer.Option("--replicas", "-k", min=1, help="Tasks per dataset entry.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first N entries.")]
TaskOption = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Only entries with such a name; may be repeated.")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Not the entries with such a name; may be repeated.")
]
EnvironmentOption = Annotated[EnvironmentKind, typer.Option(help="`local` has no isolation.")]
NetworkOption = Annotated[Network | None, typer.Option(help="What tasks may reach, whatever they say.")]
AllowHostOption = Annotated[list[str] | None, typer.Option(help="A host of the network `allowlist`; may be repeated.")]
ReuseOption = Annotated[Reuse | None, typer.Option(help="Which environments they may have, whatever they say.")]
SetupOption = Annotated[list[str] | None, typer.Option(help="A set-up command, after the task's own; may be repeated.")]
DiskOption = Annotated[int | None, typer.Option(min=64, help="MiB that a task may write, whatever it says.")]
MaxStepsOption = Annotated[int | None, typer.Option(min=1, help="Turns of the model that a task may take.")]
AgentTimeoutOption = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds that the agent has for a task, its waiting for limits apart.")
]
CommandTimeoutOption = Annotated[float | None, typer.Option(min=0.001, help="Seconds of one command of the agent.")]
TurnTokensOption = Annotated[
    int | None, typer.Option(min=1, help="The most tokens of one answer; an agent that asks for fewer gets fewer.")
]
ContextTokensOption = Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and answer together.")]
TaskBudgetOption = Annotated[
    float | None, typer.Option(min=0.000001, help="US dollars for the model calls of one attempt.")
]
MaxAttemptsOption = Annotated[
    int | None, typer.Option(min=1, max=20, help="Attempts that may fail by no fault of the agent.")
]
UserOption = Annotated[str, typer.Option(help="On whose account.")]
PriorityOption = Annotated[int, typer.Option(min=-MOST_PRIORITY, max=MOST_PRIORITY, help="Higher goes first.")]
ClassOption = Annotated[str, typer.Option("--class", help="Resource class; `megaflow classes`.")]
DeadlineOption = Annotated[
    float | None,
    typer.Option(min=0.001, max=MOST_WAIT_S, help="Seconds from the submission on; what has not ended then, expires."),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(min=0.000001, help="US dollars for model calls; the run is paused when they are spent."),
]


def model_of(
    model: str | None,
    base_url: str | None,
    api_key_env: str | None,
    sampling: Sampling | None = None,
    side_models: Sequence[str] | None = None,
) -> ModelChoice | None:
    """The model that the options name, if they name one.

    Raises: SpecInvalid: an endpoint, side models or sampling options without a model.
    """
    beside = tuple(side_models or ())
    if model:
        return ModelChoice(
            name=model, base_url=base_url, api_key_env=api_key_env, sampling=sampling, side_models=beside
        )
    given = [
        option
        for option, value in (("--base-url", base_url), ("--api-key-env", api_key_env), ("--side-model", beside))
        if value
    ]
    given += [f"--{name.replace('_', '-')}" for name in (sampling.model_fields_set if sampling else ())]
    if given:
        raise SpecInvalid(
            f"expected --model beside {' and '.join(given)}, found none;"
            " try --model with its name at that endpoint; nothing was submitted"
        )
    return None


def check_of(flow: MegaFlow, no_check: bool) -> Callable[[ModelChoice], None] | None:
    """Has the gateway check a model's endpoint and key; prints what could not be checked. None: no check is wanted."""

    def check(model: ModelChoice) -> None:
        for warning in flow.check_model(model):
            say(f"model {model.name}: {warning}")

    return None if no_check else check


def arguments_of(given: Sequence[str] | None) -> dict[str, str]:
    """The agent's arguments by key. Raises: SpecInvalid: one without a key or `=`, or a key that is given twice."""
    found: dict[str, str] = {}
    for one in given or ():
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise SpecInvalid(f"--agent-arg: expected KEY=VALUE, found {one[:80]!r}; nothing was submitted")
        if key in found:
            raise SpecInvalid(f"--agent-arg: expected each key once, found {key!r} twice; nothing was submitted")
        found[key] = value
    return found


def sampling_of(
    temperature: float | None, top_p: float | None, max_tokens: int | None, seed: int | None
) -> Sampling | None:
    """The sampling options that were given; None: none was. Raises: SpecInvalid: a value is out of its range."""
    values = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return Sampling.model_validate(given) if given else None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise SpecInvalid(f"{option}: {first['msg']}, found {first['input']!r}; nothing was submitted") from error


def limits_of(
    max_steps: int | None,
    agent_timeout: float | None,
    command_timeout: float | None,
    turn_tokens: int | None,
    context_tokens: int | None,
    task_budget: float | None,
    max_attempts: int | None,
) -> LimitOverrides:
    """What the options change in the tasks' limits; seconds, tokens, US dollars."""
    return LimitOverrides(
        max_steps=max_steps,
        agent_timeout_s=agent_timeout,
        command_timeout_s=command_timeout,
        max_turn_tokens=turn_tokens,
        context_tokens=context_tokens,
        budget_usd=task_budget,
        max_attempts=max_attempts,
    )


def overrides_of(
    network: Network | None,
    allow_host: Sequence[str] | None,
    reuse: Reuse | None,
    setup: Sequence[str] | None,
    disk: int | None,
) -> EnvironmentOverrides:
    """What the options change in the tasks' environments; disk: MiB."""
    return EnvironmentOverrides(
        network=network,
        allowed_hosts=tuple(allow_host or ()),
        reuse=reuse,
        setup=tuple(setup or ()),
        disk_bytes=None if disk is None else disk << 20,
    )
