"""Defines options shared by `megaflow submit` and `megaflow schedule add`: tasks, agent, model, limits, account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import ValidationError

from app.cli.show import say
from app.client import MegaFlow
from app.datasets.selection import Selection
from app.errors import OptionInvalid
from app.evaluation import Submission
from app.models.kinds import Purpose
from app.models.overrides import EnvironmentOverrides, LimitOverrides
from app.models.resources import MOST_KILL_AT
from app.models.spec import (
    MOST_PRIORITY,
    MOST_WAIT_S,
    EnvironmentKind,
    Mode,
    ModelChoice,
    Network,
    Reuse,
    Sampling,
    Wire,
)

_DATES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]


@dataclass(kw_only=True)
class SubmissionOptions:
    """Fields for the options of a submission; `takes_options` adds them to a command."""

    agent: Annotated[
        str,
        typer.Option(
            "--agent", "-a", help="Names from `megaflow agents list`, separated by commas, or `all` frameworks."
        ),
    ]
    agent_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Argument of the agent's adapter; may be repeated. `megaflow agents list` has the keys.",
        ),
    ] = None
    mode: Annotated[Mode, typer.Option(help="Kind of instances to run on.")] = Mode.AUTO
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Name of the model or of a route; `replay` or `replay:RUN`: scripted."),
    ] = None
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible base URL; default: from the settings.")] = None
    api_key_env: Annotated[
        str | None, typer.Option(help="Variable with the key; register it with the URL by `megaflow models add`.")
    ] = None
    side_model: Annotated[
        list[str] | None, typer.Option(help="Another model that the agent may call; may be repeated.")
    ] = None
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not have the gateway check the model's endpoint and key first.")
    ] = False
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Sampling temperature; overrides the agent's.")
    ] = None
    top_p: Annotated[float | None, typer.Option(min=0.000001, max=1, help="Sampling top_p; overrides the agent's.")] = (
        None
    )
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of one answer; overrides the agent's in every call.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Sampling seed, where the model's API has one.")
    ] = None
    replicas: Annotated[int, typer.Option("--replicas", "-k", min=1, help="Tasks per dataset entry.")] = 1
    most_replicas: Annotated[
        int | None,
        typer.Option(
            "--max-replicas", min=2, help="Training runs: total replicas of a group whose first rewards differ."
        ),
    ] = None
    quorum: Annotated[
        int | None,
        typer.Option(min=1, help="Training runs: replicas that complete a group; the others are superseded."),
    ] = None
    hedge_after: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENTILE",
            help="Training runs: duplicate a replica that is slower than this percentile, e.g. `p95`.",
        ),
    ] = None
    max_running: Annotated[
        int | None, typer.Option("--concurrency", "-n", min=1, help="Maximum attempts of this run at once.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N entries.")] = None
    only: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="GLOB", help="Only entries whose name matches; may be repeated."),
    ] = None
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave out entries whose name matches; may be repeated.")
    ] = None
    languages: Annotated[
        list[str] | None,
        typer.Option("--language", help="Only entries in this language, as the dataset names it; may be repeated."),
    ] = None
    repositories: Annotated[
        list[str] | None,
        typer.Option("--repo", metavar="GLOB", help="Only entries whose repository matches; may be repeated."),
    ] = None
    since: Annotated[
        datetime | None, typer.Option(formats=_DATES, help="Only entries created at this time (UTC) or later.")
    ] = None
    until: Annotated[
        datetime | None, typer.Option(formats=_DATES, help="Only entries created before this time (UTC).")
    ] = None
    pass_rate: Annotated[
        str | None, typer.Option(metavar="BOUNDS", help="Only entries with a pass rate in these bounds: '0<p<1'.")
    ] = None
    pass_rate_from: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="Run that gives the pass rates for --pass-rate.")
    ] = None
    sample: Annotated[
        int | None, typer.Option(min=1, help="Number of entries to draw at random, by --sample-seed.")
    ] = None
    sample_seed: Annotated[int, typer.Option(min=0, help="Seed of --sample: the same seed draws the same entries.")] = 0
    include_quarantined: Annotated[
        bool, typer.Option("--include-quarantined", help="Include entries that `dataset validate` put in quarantine.")
    ] = False
    record_diffs: Annotated[
        bool, typer.Option("--record-diffs", help="Record the repository's diff after each step of the agent.")
    ] = False
    environment: Annotated[EnvironmentKind, typer.Option(help="`local` has no isolation.")] = EnvironmentKind.DOCKER
    network: Annotated[Network | None, typer.Option(help="Network of the tasks; overrides the tasks' own.")] = None
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Allowed host for the network `allowlist`; may be repeated.")
    ] = None
    reuse: Annotated[Reuse | None, typer.Option(help="Reuse of environments; overrides the tasks' own.")] = None
    setup: Annotated[
        list[str] | None, typer.Option(help="Set-up command to run after the task's own; may be repeated.")
    ] = None
    disk: Annotated[int | None, typer.Option(min=64, help="MiB that a task may write; overrides the task's own.")] = (
        None
    )
    kill_at: Annotated[
        str | None,
        typer.Option(
            metavar="FACTOR",
            help="Maximum memory and processors, e.g. `3x` of what a task is guaranteed; default: 1x of a stated"
            " size, 3x of the settings'.",
        ),
    ] = None
    max_steps: Annotated[int | None, typer.Option(min=1, help="Maximum model turns of a task.")] = None
    agent_timeout_s: Annotated[
        float | None,
        typer.Option(
            "--agent-timeout", min=0.001, help="Seconds that the agent has for a task, without its waiting for limits."
        ),
    ] = None
    command_timeout_s: Annotated[
        float | None, typer.Option("--command-timeout", min=0.001, help="Maximum seconds of one command of the agent.")
    ] = None
    max_turn_tokens: Annotated[
        int | None,
        typer.Option("--turn-tokens", min=1, help="Maximum tokens of one answer; an agent may ask for fewer."),
    ] = None
    context_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of prompt and answer together.")] = (
        None
    )
    task_budget: Annotated[
        float | None, typer.Option(min=0.000001, help="US dollars for the model calls of one attempt.")
    ] = None
    max_attempts: Annotated[
        int | None, typer.Option(min=1, max=20, help="Maximum attempts if they fail without a fault of the agent.")
    ] = None
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="END=NUMBER",
            help="Reward by end reason (`step_limit`; `not_submitted`: any but `submitted`); may be repeated.",
        ),
    ] = None
    purpose: Annotated[
        Purpose, typer.Option(help="`training`: attempts become samples; `synthesis`: good trajectories are stored.")
    ] = Purpose.EVALUATION
    user_name: Annotated[str, typer.Option("--user", help="User who owns the run.")] = "default"
    priority: Annotated[
        int, typer.Option(min=-MOST_PRIORITY, max=MOST_PRIORITY, help="Higher priorities run first.")
    ] = 0
    resource_class: Annotated[str, typer.Option("--class", help="Resource class; `megaflow classes`.")] = "standard"
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            min=0.001,
            max=MOST_WAIT_S,
            help="Seconds from the submission on; tasks that have not ended then expire.",
        ),
    ] = None
    budget_usd: Annotated[
        float | None,
        typer.Option("--budget", min=0.000001, help="US dollars for model calls; the run pauses when they are spent."),
    ] = None

    def submission(self, datasets: Sequence[str], *, name: str, delay_s: float = 0.0) -> Submission:
        """Returns the submission that the options describe. Raises: SpecInvalid."""
        return Submission(
            dataset=joined(datasets),
            name=name,
            delay_s=delay_s,
            model=self._model(),
            selection=self._selection(),
            agent_args=arguments_of(self.agent_arg),
            rewards=rewards_of(self.reward),
            overrides=EnvironmentOverrides(
                network=self.network,
                allowed_hosts=tuple(self.allow_host or ()),
                reuse=self.reuse,
                setup=tuple(self.setup or ()),
                disk_bytes=None if self.disk is None else self.disk << 20,
                kill_at=None if self.kill_at is None else factor_of(self.kill_at),
            ),
            limits=LimitOverrides(budget_usd=self.task_budget, **self._named_as_in(LimitOverrides, "budget_usd")),
            **self._named_as_in(Submission, "model"),
        )

    def _named_as_in(self, model: type[Wire], *others: str) -> dict[str, Any]:
        """Returns the options that the model's fields are named after, but for `others`."""
        return {name: getattr(self, name) for name in model.model_fields if name not in others and hasattr(self, name)}

    def _selection(self) -> Selection:
        named = self._named_as_in(Selection)
        values: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        try:
            return Selection(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            message = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
            raise OptionInvalid(f"which entries: {message}; nothing was submitted") from error

    def check(self, flow: MegaFlow) -> Callable[[ModelChoice], None] | None:
        """Returns a check that has the gateway test a model's endpoint and key, and prints what it could not test.

        None: no check is wanted, or the client uses a server, which makes no check.
        """

        def check(model: ModelChoice) -> None:
            for warning in flow.check_model(model):
                say(f"model {model.name}: {warning}")

        return None if self.no_check or flow.server else check

    def _model(self) -> ModelChoice | None:
        """Returns the model. Raises: SpecInvalid: an endpoint, side models or sampling options without a model."""
        options = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        sampling = {name: value for name, value in options.items() if value is not None}
        apart = {"base_url": self.base_url, "api_key_env": self.api_key_env, "side_model": self.side_model}
        if self.model:
            return ModelChoice(
                name=self.model,
                base_url=self.base_url,
                api_key_env=self.api_key_env,
                sampling=Sampling.model_validate(sampling) if sampling else None,
                side_models=tuple(self.side_model or ()),
            )
        given = [
            f"--{name.replace('_', '-')}" for name, value in (apart | sampling).items() if value or name in sampling
        ]
        if given:
            raise OptionInvalid(
                f"expected --model beside {' and '.join(given)}, found none;"
                " try --model with its name at that endpoint; nothing was submitted"
            )
        return None


def joined(datasets: Sequence[str]) -> str:
    """Joins several datasets as a submission names them. Raises: SpecInvalid: a comma in a path."""
    if len(datasets) > 1 and (wrong := [one for one in datasets if "," in one and Path(one).exists()]):
        raise OptionInvalid(f"expected several datasets without a comma in a path; found {wrong[0]!r}; rename it")
    return ",".join(datasets)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command every option of `SubmissionOptions`; it gets them as its argument `options`."""
    return takes(*(field.name for field in fields(SubmissionOptions)))(command)


def takes(*names: str, **given: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command only these options of `SubmissionOptions`; the others are as `given`, else their defaults."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            options = SubmissionOptions(**given, **{name: values.pop(name) for name in names})
            command(options=options, **values)

        hints, own_hints = (get_type_hints(one, include_extras=True) for one in (SubmissionOptions, command))
        own = [one.replace(annotation=own_hints[one.name]) for one in signature(command).parameters.values()]
        shared = [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(SubmissionOptions)
            if field.name in names
        ]
        parameters = [
            *(one for one in own if one.kind is not Parameter.KEYWORD_ONLY),
            *shared,
            *(one for one in own if one.kind is Parameter.KEYWORD_ONLY and one.name != "options"),
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorated


def arguments_of(given: Sequence[str] | None) -> dict[str, str]:
    """Returns the agent's arguments by key. Raises: SpecInvalid: no key, no `=`, or a repeated key."""
    return _pairs("--agent-arg: expected KEY=VALUE", given)


def rewards_of(given: Sequence[str] | None) -> dict[str, float]:
    """Returns the rewards by end reason. Raises: SpecInvalid: not a number, or a repeated end."""
    form = "--reward: expected END=NUMBER"
    try:
        return {end: float(value) for end, value in _pairs(form, given).items()}
    except ValueError:
        raise OptionInvalid(f"{form}, found {str(given)[:80]}; nothing was submitted") from None


def _pairs(form: str, given: Sequence[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for one in given or ():
        key, equals, value = one.partition("=")
        if not key or not equals or key in pairs:
            raise OptionInvalid(f"{form}, each key once; found {one[:80]!r}; nothing was submitted")
        pairs[key] = value
    return pairs


def factor_of(given: str) -> float:
    """Reads a factor: `3x` or `3`. Raises: SpecInvalid."""
    try:
        factor = float(given.strip().removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= MOST_KILL_AT:
        raise OptionInvalid(f"expected a factor such as 3x, from 1x to {MOST_KILL_AT}x; found {given[:40]!r}")
    return factor
