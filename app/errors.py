"""All errors, one class per boundary that a task crosses.

A message says what was expected, what was found and what to try. Nothing here imports other modules, so every
layer can raise these. Which of them are retried is decided in one place, `app.models.endings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class MegaFlowError(Exception):
    """Whatever MegaFlow refuses or could not do, with a message for a person.

    `exit_code` is what the command line leaves with (sysexits' numbers where one fits).
    """

    exit_code: ClassVar[int] = 1


# --- What a user gave us -------------------------------------------------------------------------------------------


class SettingsInvalid(MegaFlowError):
    """A setting is unknown, malformed or missing."""

    exit_code = 78


class SpecInvalid(MegaFlowError):
    """A task, a row or a folder is malformed; nothing of its batch was accepted."""

    exit_code = 65


class OptionInvalid(SpecInvalid):
    """A word of the command line, or the argument of the API that it stands for, is wrong; nothing was accepted."""

    exit_code = 64


class ReportRefused(MegaFlowError):
    """A figure would say more than the runs behind it do; which, and how to have it all the same, is in the message."""

    exit_code = 65


class ExportRefused(MegaFlowError):
    """The file or folder to write exists already, or the format cannot hold what was chosen; nothing was written."""

    exit_code = 65


class SampleRefused(MegaFlowError):
    """What was recorded of an attempt cannot be trained on, or a batch cannot be handed out or committed; why."""

    exit_code = 65


class RowBroken(SpecInvalid):
    """A dataset's row contradicts its image: nothing that an agent does could be scored."""


class InputMissing(SpecInvalid):
    """An artifact that a task was to get of an earlier one is not there; another attempt would not find it either."""


class DatasetInvalid(SpecInvalid):
    """A dataset cannot be read: no such file or folder, an unknown format, a bad row.

    `where` and `field` are the place and the column of a bad row, when it has them.
    """

    where: str = ""
    field: str = ""


class DatasetUnknown(DatasetInvalid):
    """An argument that names no dataset, or does not say whose rows it means."""

    exit_code = 64


class DatasetUnavailable(MegaFlowError):
    """A dataset's server does not answer, refuses, or is not to be asked; what is on this host does not suffice."""

    exit_code = 69


class DependencyMissing(MegaFlowError):
    """The command needs packages of an extra that is not installed."""

    exit_code = 69


class UnknownName(MegaFlowError):
    """A name that no agent, dataset, mode, run, task or schedule has."""

    exit_code = 64

    @classmethod
    def of(cls, kind: str, found: str, known: list[str]) -> UnknownName:
        """`unknown agent 'x'; did you mean xy? known: a, b`."""
        listed = ", ".join(sorted(known)) or "none yet"
        return cls(f"unknown {kind} {found[:_LONGEST_NAME]!r};{did_you_mean(found, known)} known: {listed}")


class UnknownToLibrary(UnknownName):
    """A grading library does not know what a row names in `column`."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


class AmbiguousName(UnknownName):
    """A name or the end of an id that more than one has."""


class IdempotencyConflict(MegaFlowError):
    """The idempotency key was used before, for a different task."""

    exit_code = 65


class LimitInvalid(MegaFlowError):
    """A limit, quota, weight or resource class is unknown or has an impossible value; nothing was changed."""

    exit_code = 64


class NotSignedIn(MegaFlowError):
    """No token of the web server, or one that is unknown or has lapsed."""

    exit_code = 77


class NotAllowed(MegaFlowError):
    """The token's scopes do not contain this, or a browser's form did not come from our page."""

    exit_code = 77


class TooManyRequests(MegaFlowError):
    """The caller asks the web server more often than it may."""

    exit_code = 75


class QuotaExceeded(MegaFlowError):
    """The user's quota leaves no room for what was asked; nothing was accepted."""

    exit_code = 75


# --- What the system is made of -----------------------------------------------------------------------------------


class DatabaseUnavailable(MegaFlowError):
    """PostgreSQL does not answer; nothing was changed."""

    exit_code = 69


class ServerUnavailable(DatabaseUnavailable):
    """The web server of an installation does not answer, or its database does not; it may have done what was asked."""


class NotRemote(MegaFlowError):
    """What was asked for has no form over the HTTP API: it needs the installation's own machine."""

    exit_code = 64


class BrokerUnavailable(MegaFlowError):
    """Redis does not answer."""

    exit_code = 69


class StackNotRunning(MegaFlowError):
    """The command needs a running system."""

    exit_code = 69


class InstallationFailed(MegaFlowError):
    """Something that had to be installed on this machine could not be."""

    exit_code = 69


class ArtifactStoreUnavailable(MegaFlowError):
    """The object store refuses or does not answer."""

    exit_code = 69


class ArtifactMissing(MegaFlowError):
    """The object is not in the store."""

    exit_code = 66


class ArtifactChanged(MegaFlowError):
    """The object in the store is not the one whose sha256 was recorded; nothing was made of it."""

    exit_code = 65


class IllegalMove(MegaFlowError):
    """A state may not follow from another; the database refused it."""


class StaleWriter(MegaFlowError):
    """This attempt is no longer the task's current one; its write was refused and it must stop."""


class WaitTimeout(MegaFlowError, TimeoutError):
    """The task had not ended when the caller's patience did. The task goes on."""

    exit_code = 75


# --- Stations of a task --------------------------------------------------------------------------------------------


class StationError(MegaFlowError):
    """A station could not do its work for this attempt. `infrastructure` unless a subclass says otherwise."""


class EngineUnavailable(StationError):
    """No container engine answers."""

    exit_code = 69


class ImageUnavailable(StationError):
    """The image can be neither found here nor pulled."""


class ImageMissing(ImageUnavailable):
    """Every registry that may have the image answered that it has none of that name."""


class ImageDenied(ImageUnavailable):
    """A registry denies the image; none of the others has it.

    Many registries say so, too, of an image that they do not have.
    """


class ImageUnfit(ImageUnavailable):
    """The image is here and no environment can be made of it: another architecture, no shell. It would be so again."""


class ImageBuildFailed(StationError):
    """The image's recipe failed; the log's tail is in the message."""


class EnvironmentFailed(StationError):
    """The environment could not be created, or died under the task."""


class SetupFailed(EnvironmentFailed):
    """A set-up command of the task failed, or left what its policy does not allow. Tried once more."""


class SetupTimedOut(EnvironmentFailed):
    """The set-up commands were not done in the environment's time: a command that hangs, or a host that was busy."""


class ServiceUnhealthy(EnvironmentFailed):
    """One of several containers could not be started, ended, is unhealthy or was not ready in time.

    Its name and last words are told.
    """


class EnvironmentVanished(EnvironmentFailed):
    """The environment ended under the task, was removed by another process, or cannot be reached any more."""


class NotRestarted(EnvironmentVanished):
    """The environment is there, and its restart failed: by what was left in it, or by its host."""


class NoPlaceToStart(EnvironmentFailed):
    """No place among the environments that may start at once came free in time."""


class EnvironmentOverLimit(EnvironmentFailed):
    """The environment was ended because what ran in it took more than it may: the task's own doing, not ours."""


class HostOutOfMemory(EnvironmentFailed):
    """The kernel killed a process of the environment for want of the host's memory: its own limit was never met."""


class HostDiskFull(EnvironmentFailed):
    """The environment was ended because its host's disk was nearly full: it had written most, within its own limit."""


class DiskFull(StationError):
    """No space left where the task's data goes."""

    exit_code = 74


class AgentUnavailable(StationError):
    """The agent's framework is not installed and could not be."""

    exit_code = 69


class AgentNotSetUp(AgentUnavailable):
    """It cannot be installed before a setting or this host changes; asking again says the same."""

    exit_code = 78


class AgentUnsuitable(StationError):
    """The environment cannot run the agent's framework: another C library, another architecture."""

    exit_code = 65


class AgentFailed(StationError):
    """The agent's framework broke; a result of the agent, not of the infrastructure."""


class CallThrottled(MegaFlowError):
    """A model call waited for `limit` for as long as it may. Infrastructure, never the model's fault."""

    exit_code = 75

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class ModelEndpointUnavailable(StationError):
    """The model endpoint is down or answers rubbish."""

    exit_code = 69


class ModelRefused(ModelEndpointUnavailable):
    """The endpoint refuses the key or does not have the model: another attempt would end the same."""


class GradingFailed(StationError):
    """The grader itself could not judge: no reward, no parsable report, no end."""


class TestRunnerMissing(GradingFailed):
    """The tests did not start: their program is not in the environment."""

    __test__ = False  # no class of pytest's


class InstanceFailed(StationError):
    """A provider could not start or reach an instance."""


class LaunchUnclear(InstanceFailed):
    """A provider was asked for instances and gave no answer: it may have started them. To be asked again."""


class NoCapacity(InstanceFailed):
    """A provider answered that it has no machine of this size now, or that a quota is used up."""


# --- Words ----------------------------------------------------------------------------------------------------------


_LONGEST_NAME = 200
"""That is compared with others."""


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """` did you mean NAME?`; empty where no name is near, or it is no name at all."""
    if len(found) > _LONGEST_NAME:
        return ""
    from difflib import get_close_matches  # for messages alone

    close = get_close_matches(found.lower(), list(known), n=1)
    return f" did you mean {close[0]}?" if close else ""


_EXPECTED = {
    "missing": "a value",
    "extra_forbidden": "no such key",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_pattern_mismatch": "a text that fits {pattern}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "json_invalid": "JSON, which the text is not: {error}",
}
"""By the type of one of pydantic's errors."""


def explained(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as `expected …`; a validator's own message as it is."""
    if error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    bounds = {
        name: int(one) if isinstance(one, float) and one.is_integer() else one
        for name, one in error.get("ctx", {}).items()
    }
    words = _EXPECTED.get(error["type"], "")
    return f"expected {words.format(**bounds) or str(error['msg']).removeprefix('Input should be ')}"
