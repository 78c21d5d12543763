"""Judges tasks by the results of oracle, nop and cheat: valid, or quarantined with the reason. No I/O.

A task is valid when its gold solution gets 1, doing nothing gets 0 and no attack on its grading gets more than 0,
each time, on one image.
Source: Terminal-Bench 3 runs oracle, nop and `/cheat` trials for each task; SWE-bench's authors chose tasks whose gold
patch passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.ledger.validations import TaskIdentity
from app.models.endings import BLAME, Blame
from app.models.outcome import TaskResult, TestStatus
from app.models.validation import Validation, ValidationState, short_reason

CHEAT = "cheat"
_EXPECTED = {"oracle": 1.0, "nop": 0.0}
_SHOWN = 5
_PASSING = frozenset({TestStatus.PASSED, TestStatus.SKIPPED})
_OF_THE_TASK: Mapping[str, str] = {
    "ImageBuildFailed": "the image could not be built",
    "ImageMissing": "the image does not exist",
    "ImageDenied": "the image may not be pulled",
    "ImageUnfit": "the image does not fit",
    "SetupFailed": "its set-up failed",
    "SetupTimedOut": "its set-up did not end",
    "ServiceUnhealthy": "one of its services is not well",
    "RowBroken": "its gold patch does not apply",
    "SpecInvalid": "it is refused as it stands",
    "DatasetInvalid": "it is refused as it stands",
    "TestRunnerMissing": "its test runner is not in the image",
    "GradingFailed": "it could not be graded",
    "AgentFailed": "it leaves nothing that could be graded",
    "EnvironmentOverLimit": "its environment takes more than it may",
}
"""Failures that would occur on any host, by class of the error; all others are not the task's fault."""


@dataclass(frozen=True, slots=True)
class ValidationTrial:
    """A replica of one agent on a task. agent: `oracle`, `nop`, `cheat`, or `cheat ATTACK`."""

    agent: str
    result: TaskResult

    @property
    def image_id(self) -> str:
        """Image of the last attempt with an environment; empty: none had one, or there is no image."""
        ids = [str(one.environment.get("image_id") or "") for one in self.result.attempts]
        return next((one for one in reversed(ids) if one), "")

    @property
    def reward(self) -> float | None:
        """Reward that counts; None: not scored. A suspect verdict counts 0."""
        return self.result.reward

    @property
    def failure(self) -> str:
        """Class of the error because of which it was not scored."""
        last = self.result.attempt
        failure = (last.failure if last else None) or self.result.failure
        return failure.error if failure else str(self.result.end_reason or "unknown")

    @property
    def message(self) -> str:
        last = self.result.attempt
        failure = (last.failure if last else None) or self.result.failure
        return failure.message if failure else ""


def candidate(task: TaskIdentity, runs: Sequence[str]) -> Validation:
    """Creates the validation of a task whose image is not known yet."""
    return Validation(
        content=task.content,
        dataset=task.dataset,
        task=task.name,
        image=task.image,
        state=ValidationState.CANDIDATE,
        runs=tuple(runs),
    )


def judged(
    task: TaskIdentity, trials: Iterable[ValidationTrial], *, times: int, agents: Sequence[str], runs: Sequence[str]
) -> list[Validation]:
    """Judges the task by its trials, separately for each image. Trials without an image join another image's, if any.

    times: replicas of each agent; agents: those that must have run, as `ValidationTrial.agent` names them.
    """
    by_image: dict[str, list[ValidationTrial]] = defaultdict(list)
    for one in trials:
        by_image[one.image_id].append(one)
    if len(by_image) > 1 and "" in by_image:  # another replica had an image: report the fault there
        next(iter(group for image, group in by_image.items() if image)).extend(by_image.pop(""))
    return [
        _on_image(candidate(task, runs), image, group, times=times, agents=agents)
        for image, group in sorted(by_image.items())
    ]


def _on_image(
    begun: Validation, image_id: str, trials: Sequence[ValidationTrial], *, times: int, agents: Sequence[str]
) -> Validation:
    groups: dict[str, list[ValidationTrial]] = {agent: [] for agent in agents}
    for one in trials:
        groups.setdefault(one.agent, []).append(one)
    flipped = tuple(sorted({name for agent, group in groups.items() if agent in _EXPECTED for name in _flipped(group)}))
    reasons = [why for agent, group in groups.items() for why in _faults(agent, group)]
    state, reason = ValidationState.QUARANTINED, "; ".join(reasons)
    if not reasons and flipped:
        reason = f"flaky: {_listed(flipped)}"
    elif not reasons:
        reason = _missing(groups, times)
        whole = ValidationState.BUILT if image_id or any(one.reward is not None for one in trials) else begun.state
        state = whole if reason else ValidationState.VALID
    return begun.model_copy(
        update={
            "image_id": image_id,
            "state": state,
            "reason": short_reason(reason),
            "rewards": {agent: tuple(one.reward for one in group) for agent, group in groups.items()},
            "flipped": flipped,
        }
    )


def _faults(agent: str, trials: Sequence[ValidationTrial]) -> Iterable[str]:
    """Yields the faults of the task that one agent's replicas show."""
    unscored = [one for one in trials if one.reward is None and one.failure in _OF_THE_TASK]
    if unscored:
        first = unscored[0]
        yield f"not scored: {_OF_THE_TASK[first.failure]} ({agent}: {' '.join(first.message.split())[:160]})"
    rewards = [one.reward for one in trials if one.reward is not None]
    if not rewards or all(_as_expected(agent, reward) for reward in rewards):
        return
    summary = f"{agent} {', '.join(f'{reward:g}' for reward in rewards)}"
    if len(set(rewards)) > 1:
        names = _flipped(trials)
        yield f"flaky: {summary}" + (f"; {_listed(names)}" if names else "")
        return
    suspect = next((one.result.verdict.suspect for one in trials if one.result.verdict), "")
    yield f"{agent} {rewards[0]:g}" + (f", suspect: {suspect}" if suspect else "")


def _as_expected(agent: str, reward: float) -> bool:
    """Whether the reward is exactly 1 for oracle, exactly 0 for nop, at most 0 for an attack."""
    return reward == _EXPECTED[agent] if agent in _EXPECTED else reward <= 0


def _flipped(trials: Sequence[ValidationTrial]) -> list[str]:
    """Returns the tests that passed for some of the replicas and not for others."""
    return flipped_tests(one.result.verdict.tests for one in trials if one.result.verdict is not None)


def flipped_tests(runs: Iterable[Mapping[str, str]]) -> list[str]:
    """Returns the tests that passed or were skipped in some runs and not in others. runs: statuses by test."""
    passed: dict[str, set[bool]] = defaultdict(set)
    for tests in runs:
        for name, status in tests.items():
            passed[name].add(status in _PASSING)
    return sorted(name for name, seen in passed.items() if len(seen) > 1)


def _missing(groups: Mapping[str, Sequence[ValidationTrial]], times: int) -> str:
    """Returns why there is no verdict on the task yet; empty: every agent was scored often enough."""
    for agent, trials in groups.items():
        scored = sum(one.reward is not None for one in trials)
        if scored < times:
            return f"{agent} was scored {scored} of {times} times{_not_its_fault(trials)}"
    return ""


def _not_its_fault(trials: Sequence[ValidationTrial]) -> str:
    for one in trials:
        if one.reward is None:
            ended = one.result.end_reason
            whose = "somebody's decision" if ended and BLAME[ended] is Blame.PERSON else "no fault of the task"
            return f"; {one.failure}, {whose}: {' '.join(one.message.split())[:160]}"
    return ", the others on another image" if trials else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tests that flipped: {', '.join(names[:_SHOWN])}{more}"


def leaking(found: Validation, findings: Sequence[str], *, gold: bool) -> Validation:
    """Returns the validation with the leak scan's findings in its image. gold: the gold solution's text is there."""
    changed: dict[str, object] = {"findings": tuple(findings)}
    if gold:
        why = f"the image holds the gold solution: {findings[0]}"
        reason = f"{found.reason}; {why}" if found.state is ValidationState.QUARANTINED else why
        changed |= {"state": ValidationState.QUARANTINED, "reason": short_reason(reason)}
    return found.model_copy(update=changed)


def unvalidated_note(states: Sequence[ValidationState | None]) -> str:
    """Returns one line on scored tasks whose images were not validated or are quarantined; empty: all are valid.

    states: one for each scored task; None: it was never validated on the image that it ran on.
    """
    bad = sum(one is ValidationState.QUARANTINED for one in states)
    unknown = sum(one not in (ValidationState.VALID, ValidationState.QUARANTINED) for one in states)
    parts = [f"{unknown} of {len(states)} scored tasks are on images that were not validated"] if unknown else []
    parts += [f"{bad} of {len(states)} scored tasks are quarantined"] if bad else []
    return f"{'; '.join(parts)} (`megaflow dataset validate`)" if parts else ""
