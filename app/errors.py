"""Defines all errors, one class per boundary that a task crosses.

A message names the expectation, the finding and a remedy. This module imports no others, so every layer can raise its
errors. `app.models.endings` alone decides which of them are retried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class MegaFlowError(Exception):
    """Base class of what MegaFlow refuses or fails to do, with a message for users.

    `exit_code` is the exit code of the command line (sysexits' numbers where one fits); a subclass without one has its
    parent's.
    """

    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code


# --- User input ----------------------------------------------------------------------------------------------------


class SettingsInvalid(MegaFlowError, exit_code=78):
    """A setting is unknown, malformed or missing."""


class SpecInvalid(MegaFlowError, exit_code=65):
    """A task, a row or a folder is malformed; nothing of its batch was accepted."""


class OptionInvalid(SpecInvalid, exit_code=64):
    """A command-line word, or the API argument that it stands for, is wrong; nothing was accepted."""


class ReportRefused(MegaFlowError, exit_code=65):
    """The runs do not support a figure; the message names it and how to get it nevertheless."""


class ExportRefused(MegaFlowError, exit_code=65):
    """The file or folder to write exists already, or the format cannot hold the selection; nothing was written."""


class SampleRefused(MegaFlowError, exit_code=65):
    """The record of an attempt cannot be trained on, or a batch cannot be handed out or committed."""


class RowBroken(SpecInvalid):
    """A dataset's row contradicts its image: no work of an agent could be scored."""


class InputMissing(SpecInvalid):
    """A task's input artifact of an earlier task does not exist; another attempt would not find it either."""


class DatasetInvalid(SpecInvalid):
    """A dataset cannot be read: no such file or folder, an unknown format, a bad row.

    `where` and `field` are the place and the column of a bad row, if known.
    """

    where: str = ""
    field: str = ""


class DatasetUnknown(DatasetInvalid, exit_code=64):
    """The argument names no dataset, or does not say whose rows it means."""


class DatasetUnavailable(MegaFlowError, exit_code=69):
    """A dataset's server does not answer, refuses, or must not be used; the data on this host is not enough."""


class DependencyMissing(MegaFlowError, exit_code=69):
    """The command needs packages of an extra that is not installed."""


class UnknownName(MegaFlowError, exit_code=64):
    """No agent, dataset, mode, run, task or schedule has this name."""

    @classmethod
    def of(cls, kind: str, found: str, known: list[str]) -> UnknownName:
        """Creates the error `unknown agent 'x'; did you mean xy? known: a, b`."""
        listed = ", ".join(sorted(known)) or "none yet"
        return cls(f"unknown {kind} {found[:_LONGEST_NAME]!r};{did_you_mean(found, known)} known: {listed}")


class UnknownToLibrary(UnknownName):
    """A grading library does not know the value that a row has in `column`."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


class AmbiguousName(UnknownName):
    """Several objects have this name, or an id with this end."""


class IdempotencyConflict(MegaFlowError, exit_code=65):
    """The idempotency key was used before, for a different task."""


class LimitInvalid(MegaFlowError, exit_code=64):
    """A limit, quota, weight or resource class is unknown or has an impossible value; nothing was changed."""


class NotSignedIn(MegaFlowError, exit_code=77):
    """The token for the web server is missing, unknown or expired."""


class NotAllowed(MegaFlowError, exit_code=77):
    """The token's scopes do not include this, or a browser's form did not come from our page."""


class TooManyRequests(MegaFlowError, exit_code=75):
    """The caller sends more requests to the web server than allowed."""


class QuotaExceeded(MegaFlowError, exit_code=75):
    """The request exceeds the user's quota; nothing was accepted."""


# --- Services and the ledger ---------------------------------------------------------------------------------------


class DatabaseUnavailable(MegaFlowError, exit_code=69):
    """PostgreSQL does not answer; nothing was changed."""


class ServerUnavailable(DatabaseUnavailable):
    """The web server of an installation, or its database, does not answer; it may have carried out the request."""


class NotRemote(MegaFlowError, exit_code=64):
    """The operation has no form over the HTTP API: it needs the installation's own machine."""


class BrokerUnavailable(MegaFlowError, exit_code=69):
    """Redis does not answer."""


class StackNotRunning(MegaFlowError, exit_code=69):
    """The command needs a running system."""


class InstallationFailed(MegaFlowError, exit_code=69):
    """A required installation on this machine failed."""


class ArtifactStoreUnavailable(MegaFlowError, exit_code=69):
    """The object store refuses or does not answer."""


class ArtifactMissing(MegaFlowError, exit_code=66):
    """The object is not in the store."""


class ArtifactChanged(MegaFlowError, exit_code=65):
    """The stored object does not match the recorded sha256; it was not used."""


class IllegalMove(MegaFlowError):
    """The database refused an illegal change of state."""


class StaleWriter(MegaFlowError):
    """This attempt is no longer the task's current one; its write was refused and it must stop."""


class WaitTimeout(MegaFlowError, TimeoutError, exit_code=75):
    """The task had not ended within the caller's timeout. The task goes on."""


# --- Steps of a task -----------------------------------------------------------------------------------------------


class StationError(MegaFlowError):
    """A step of an attempt failed. Blamed on `infrastructure` unless a subclass differs."""


class EngineUnavailable(StationError, exit_code=69):
    """No container engine answers."""


class ImageUnavailable(StationError):
    """The image is not on this host and cannot be pulled."""


class ImageMissing(ImageUnavailable):
    """Every registry that may have the image reports that it has none of that name."""


class ImageDenied(ImageUnavailable):
    """A registry denies the image; none of the others has it.

    Many registries also answer so for an image that they do not have.
    """


class ImageUnfit(ImageUnavailable):
    """The image is on this host but unusable: another architecture, no shell. A retry would fail the same way."""


class ImageBuildFailed(StationError):
    """The image's recipe failed; the log's tail is in the message."""


class EnvironmentFailed(StationError):
    """The environment could not be created, or failed during the task."""


class SetupFailed(EnvironmentFailed):
    """A set-up command of the task failed, or left what its policy does not allow. Retried once."""


class SetupTimedOut(EnvironmentFailed):
    """The set-up commands did not end within the environment's time: a command hangs, or the host was busy."""


class ServiceUnhealthy(EnvironmentFailed):
    """A container of a compose project could not be started, ended, is unhealthy or was not ready in time.

    The message has its name and last output.
    """


class EnvironmentVanished(EnvironmentFailed):
    """The environment ended during the task, was removed by another process, or cannot be reached any more."""


class NotRestarted(EnvironmentVanished):
    """The environment exists, but its restart failed because of its contents or its host."""


class NoPlaceToStart(EnvironmentFailed):
    """No slot for creating an environment became free in time."""


class EnvironmentOverLimit(EnvironmentFailed):
    """The environment was ended because its processes exceeded its limit: the task's own fault."""


class HostOutOfMemory(EnvironmentFailed):
    """The kernel killed a process of the environment because the host ran out of memory, within its own limit."""


class HostDiskFull(EnvironmentFailed):
    """The environment was ended because its host's disk was nearly full: it wrote most, but within its own limit."""


class DiskFull(StationError, exit_code=74):
    """No space left where the task's data goes."""


class AgentUnavailable(StationError, exit_code=69):
    """The agent's framework is not installed, and its installation failed."""


class AgentNotSetUp(AgentUnavailable, exit_code=78):
    """The agent cannot be installed until a setting or this host changes; a retry would fail the same way."""


class AgentUnsuitable(StationError, exit_code=65):
    """The environment cannot run the agent's framework: another C library, another architecture."""


class AgentFailed(StationError):
    """The agent's framework failed; a result of the agent, not of the infrastructure."""


class CallThrottled(MegaFlowError, exit_code=75):
    """A model call waited for `limit` as long as allowed. Blamed on the infrastructure, never on the model."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class ModelEndpointUnavailable(StationError, exit_code=69):
    """The model endpoint is down or sends invalid responses."""


class ModelRefused(ModelEndpointUnavailable):
    """The endpoint refuses the key or does not have the model: another attempt would end the same way."""


class GradingFailed(StationError):
    """The grader itself failed: no reward, no parsable report, no end."""


class TestRunnerMissing(GradingFailed):
    """The tests did not start: their program is not in the environment."""

    __test__ = False  # not a pytest class


class InstanceFailed(StationError):
    """A provider could not start or reach an instance."""


class LaunchUnclear(InstanceFailed):
    """A provider gave no answer to a request for instances and may have started them. Ask it again."""


class NoCapacity(InstanceFailed):
    """A provider has no machine of this size now, or a quota is used up."""


_LONGEST_NAME = 200
"""Length limit of names that are compared with known ones."""


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """Returns ` did you mean NAME?`; empty when no name is similar, or `found` is too long for a name."""
    if len(found) > _LONGEST_NAME:
        return ""
    from difflib import get_close_matches  # used only for messages

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
"""Expectations by the type of a pydantic error."""


def explained(error: Mapping[str, Any]) -> str:
    """Formats a pydantic error as `expected …`; a validator's own message stays unchanged."""
    if error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    bounds = {
        name: int(one) if isinstance(one, float) and one.is_integer() else one
        for name, one in error.get("ctx", {}).items()
    }
    words = _EXPECTED.get(error["type"], "")
    return f"expected {words.format(**bounds) or str(error['msg']).removeprefix('Input should be ')}"
