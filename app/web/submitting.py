"""Checks submissions of users who are no administrators: nothing may read files or run on the server itself.

Datasets are given by name, runs must be the user's own, and no task runs on a host without isolation. Models are called
only at registered URLs: `WebCall.flow`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from app.agents.replay import PREFIX
from app.datasets.catalogue import CATALOGUE, near
from app.errors import DatasetUnknown, NotAllowed, OptionInvalid, UnknownName
from app.evaluation import Submission
from app.models.hosts import address_of, split
from app.models.overrides import EnvironmentOverrides
from app.models.spec import IMAGELESS, REPLAY_MODEL, AgentTask, EnvironmentKind, ModelChoice, ScriptGoal
from app.web.calls import WebCall

_REPLAY = f"{REPLAY_MODEL}:"
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9._/-]+))?")


def permitted(call: WebCall, submission: Submission) -> Submission:
    """Returns the submission, with names of runs replaced by their ids.

    Raises: NotAllowed, DatasetUnknown: a path, a host without isolation, an inner network; UnknownName: another user's
        run; OptionInvalid: a kind of environments that is not configured.
    """
    _refuse_absent(call, submission.environment)
    if call.caller.administers:
        return submission
    _refuse_paths(submission.dataset)
    _refuse_hosts([submission.environment])
    _refuse_addresses(submission.overrides.allowed_hosts)
    changes: dict[str, object] = {"model": permitted_model(call, submission.model)}
    if (rated := submission.selection.pass_rate_from) is not None:
        changes["selection"] = submission.selection.model_copy(update={"pass_rate_from": str(call.run(rated))})
    return submission.model_copy(update=changes)


def refuse_host_tasks(call: WebCall, tasks: Iterable[AgentTask], overrides: EnvironmentOverrides | None) -> None:
    """Raises: NotAllowed: a task or its verifier would run on a host without isolation, or reach an inner network;
    OptionInvalid: a kind of environments that is not configured.
    """
    if overrides is not None and not call.caller.administers:
        _refuse_addresses(overrides.allowed_hosts)
    for task in tasks:
        verifier = task.goal.environment if isinstance(task.goal, ScriptGoal) else None
        for environment in filter(None, (task.environment, verifier)):
            _refuse_absent(call, environment.kind)
            if not call.caller.administers:
                _refuse_hosts([environment.kind])
                _refuse_addresses((*environment.allowed_hosts, *environment.grading.allowed_hosts))


def _refuse_absent(call: WebCall, kind: EnvironmentKind) -> None:
    """Raises: OptionInvalid."""
    if kind is EnvironmentKind.KUBERNETES and not call.services.settings.in_cluster:
        raise OptionInvalid(
            "expected a kind of environments that this installation has ('docker', 'oci'), found 'kubernetes': its"
            " MEGAFLOW_KUBERNETES_ENVIRONMENTS names no namespace; use the kind 'docker'; nothing was submitted"
        )


def permitted_model(call: WebCall, model: ModelChoice | str | None) -> ModelChoice | None:
    """Returns the model, with a recorded run's name replaced by its id. Raises: UnknownName: another user's run."""
    chosen = ModelChoice(name=model) if isinstance(model, str) else model
    if call.caller.administers or chosen is None:
        return chosen
    side_models = tuple(_permitted_replay(call, one) for one in chosen.side_models)
    chosen = chosen.model_copy(update={"name": _permitted_replay(call, chosen.name), "side_models": side_models})
    if not chosen.name.startswith(PREFIX):
        return chosen
    run, at, agent = chosen.name.removeprefix(PREFIX).partition("@")
    return chosen.model_copy(update={"name": f"{PREFIX}{call.run(run)}{at}{agent}"})


def _permitted_replay(call: WebCall, name: str) -> str:
    """Returns the model's name, with the run that it replays as an id: its answers and refusals quote that run.

    Raises: UnknownName: no run of the user. The message is the same for another user's run as for a missing one.
    """
    provider, slash, bare = name.rpartition("/")  # as the replay engine reads it
    if not bare.startswith(_REPLAY):
        return name
    with suppress(UnknownName):
        run_id = str(call.run(bare.removeprefix(_REPLAY)))
        if (call.services.settings.recordings / run_id).is_dir():  # else the engine would list all recorded runs
            return f"{provider}{slash}{_REPLAY}{run_id}"
    raise UnknownName(
        f"model {name[:200]!r}: expected a recorded run of your own after {_REPLAY!r}, found none; scripts go by the"
        " name 'scenario-SCRIPT'; nothing was submitted"
    )


def refuse_priority(call: WebCall, priority: int) -> None:
    """Raises: NotAllowed: a priority above 0 overrides the fair share of other users."""
    if priority > 0 and not call.caller.administers:
        raise NotAllowed(
            f"expected a priority of at most 0, found {priority}: one above 0 goes before the fair share of all users"
            " and is for administrators alone; try 0, or less for what can wait; nothing was submitted"
        )


def _refuse_paths(dataset: str) -> None:
    """Raises: DatasetUnknown: anything but the name of a known dataset could be a file of this machine."""
    for one in map(str.strip, dataset.split(",")):
        match = _NAMED.fullmatch(one)
        if match is None or not (one == "demo" or match[1] in CATALOGUE) or ".." in one:
            raise DatasetUnknown(
                f"dataset {one!r}: expected the NAME or NAME@REVISION of a known dataset: only administrators submit"
                f" paths of the server; {near(one)}"
            )


def _refuse_hosts(kinds: Iterable[EnvironmentKind]) -> None:
    """Raises: NotAllowed."""
    for kind in kinds:
        if kind in IMAGELESS:
            raise NotAllowed(
                f"expected an environment with isolation, found {kind.value!r}, which runs commands on the workers'"
                " host: for administrators alone; use the kind 'docker'; nothing was submitted"
            )


def _refuse_addresses(allowed_hosts: Iterable[str]) -> None:
    """Refuses addresses. The worker refuses names that lead to a private address, unless that address is listed, too.

    Raises: NotAllowed.
    """
    for pattern in allowed_hosts:
        host, _ = split(pattern.removeprefix("*."))
        if host == "localhost" or address_of(host) is not None:
            raise NotAllowed(
                f"allowed_hosts: expected names of hosts, found {pattern!r}: addresses and localhost may be of the"
                " workers' own network, for administrators alone; nothing was submitted"
            )
