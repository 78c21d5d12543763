"""Collects and stores an attempt's artifacts; records a reason for each missing artifact."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog
import zstandard

from app.agents.base import AgentReport
from app.artifacts.base import ArtifactStore
from app.grading.base import Grade
from app.ledger.attempts import Claim
from app.ledger.model_calls import StoredCall
from app.model_service import trajectory
from app.models.model_calls import Account
from app.models.outcome import Artifact, ArtifactKind
from app.workers.command_logs import CommandLogs
from app.workers.terminal import Terminal

log = structlog.get_logger()

_NAMES = {
    ArtifactKind.PATCH: "patch.diff",
    ArtifactKind.TRAJECTORY: "trajectory.json",
    ArtifactKind.MODEL_CALLS: "model_calls.jsonl.zst",
    ArtifactKind.AGENT_FILES: "agent_files.tar.zst",
    ArtifactKind.AGENT_LOG: "agent.log",
    ArtifactKind.TEST_REPORT: "test_report.txt",
    ArtifactKind.VERDICT: "verdict.json",
    ArtifactKind.ENVIRONMENT_LOG: "environment.log",
    ArtifactKind.COMMAND_LOGS: "command_logs.tar.zst",
    ArtifactKind.TERMINAL: "terminal.cast",
    ArtifactKind.STEP_DIFFS: "step_diffs.jsonl",
}
_REDACTED = b"[redacted]"
_ALSO_SAID = ("model", "upstream_model", "detail", "finish_reason", "parameters", "sampling", "raw", "lost")
"""Text fields of a call besides its messages, reply and tools."""
_MOST_FILES_BYTES = 64 << 20
"""Size limit of an agent's own files."""
_AT_ONCE = 4
"""Number of artifacts stored at the same time."""


@dataclass
class Evidence:
    """Artifact content by kind, or the reason why it is missing. A grader stores only `kinds`; the agent's are stored.

    earlier_logs, earlier_terminal: keys of the logs and recording that another worker stored for the attempt.
    """

    scripted: bool = False
    kinds: Sequence[ArtifactKind] = tuple(kind for kind in _NAMES if kind is not ArtifactKind.STEP_DIFFS)
    earlier_logs: str | None = None
    earlier_terminal: str | None = None
    terminal: Terminal = field(default_factory=Terminal)
    _files: Path | None = None
    _logs: CommandLogs | None = None
    _found: dict[ArtifactKind, bytes] = field(default_factory=dict)
    _missing: dict[ArtifactKind, str] = field(
        default_factory=lambda: (
            dict.fromkeys(_NAMES, "the attempt did not get that far")
            | {ArtifactKind.TERMINAL: "no command was run"}
            | {ArtifactKind.TEST_REPORT: "no grading came to its end; what tests printed is in `terminal`"}
        )
    )

    def of_agent(self, report: AgentReport) -> None:
        """Adds the agent's log (read now) and files (read from its scratch folder when stored)."""
        if report.log is not None and report.log.is_file():
            self._found[ArtifactKind.AGENT_LOG] = report.log.read_bytes()
        else:
            self._missing[ArtifactKind.AGENT_LOG] = "this agent wrote none"
        if report.files is not None and report.files.is_dir():
            self._files = report.files
        else:
            self._missing[ArtifactKind.AGENT_FILES] = "this agent left none"
        for kind in (ArtifactKind.TRAJECTORY, ArtifactKind.MODEL_CALLS):
            self._missing[kind] = "this agent called no model"

    def of_model(
        self,
        claimed: Claim,
        version: str,
        read: Callable[[], Sequence[StoredCall]],
        account: Account,
        *,
        redact: Sequence[str],
    ) -> None:
        """Adds the model calls recorded by the gateway, and the trajectory; an error becomes the reason why missing.

        Raises nothing: a missing record of the calls must not cost the result.
        """
        calls: Sequence[StoredCall] = ()
        with self._missing_note(ArtifactKind.MODEL_CALLS, ArtifactKind.TRAJECTORY):
            calls = without_secrets(read(), redact)
        if not calls:
            return
        self.scripted = any(call.scripted for call in calls)
        with self._missing_note(ArtifactKind.MODEL_CALLS):
            self._found[ArtifactKind.MODEL_CALLS] = trajectory.export(calls)
        with self._missing_note(ArtifactKind.TRAJECTORY):
            about = trajectory.About(
                session_id=str(claimed.attempt_id),
                agent=claimed.spec.agent,
                version=version,
                model=claimed.spec.model.name if claimed.spec.model else "",
                task=claimed.spec.task.name,
                usage=account.describe(),
            )
            document = trajectory.atif(calls, about)
            self._found[ArtifactKind.TRAJECTORY] = json.dumps(document, ensure_ascii=False).encode()

    @contextmanager
    def _missing_note(self, *kinds: ArtifactKind) -> Iterator[None]:
        """Turns any error of the block into the reason why these kinds are missing."""
        try:
            yield
        except Exception as error:
            log.exception("evidence.not_made", kinds=[kind.value for kind in kinds])
            for kind in kinds:
                self._missing[kind] = f"could not be made: {type(error).__name__}: {str(error)[:500]}"

    def patch(self, patch: bytes | None, *, why: str = "the task has no repository") -> None:
        """Adds the patch; an empty patch is evidence too. None: there is no patch, for the reason `why`."""
        if patch is None:
            self._missing[ArtifactKind.PATCH] = why
        else:
            self._found[ArtifactKind.PATCH] = patch

    def step_diffs(self, content: bytes) -> None:
        """Adds the diffs of the steps, for a run with `record_diffs`."""
        self.kinds = (*self.kinds, ArtifactKind.STEP_DIFFS)
        self._found[ArtifactKind.STEP_DIFFS] = content

    def environment(self, logs: Mapping[str, bytes], outlet: Mapping[str, Any] | None) -> None:
        """Adds the logs of each service, by its name, and the record of the egress proxy (`outlet`), if any."""
        parts = [f"== {name} ==\n".encode() + content for name, content in logs.items()]
        if outlet is not None:
            parts.append(b"== network ==\n" + json.dumps(outlet, indent=2).encode())
        if parts:
            self._found[ArtifactKind.ENVIRONMENT_LOG] = b"\n".join(parts)
        else:
            self._missing[ArtifactKind.ENVIRONMENT_LOG] = "one container: its commands are its log"

    def command_logs(self, logs: CommandLogs, *, why: str = "no output was too long to be handed on whole") -> None:
        """Adds the long outputs of commands. why: the reason to record if there are none."""
        self._logs = logs
        self._missing[ArtifactKind.COMMAND_LOGS] = why

    def grade(self, grade: Grade) -> None:
        self._found[ArtifactKind.TEST_REPORT] = grade.report
        content = grade.verdict.model_dump(mode="json") | {"scripted": self.scripted}
        self._found[ArtifactKind.VERDICT] = json.dumps(content, indent=2).encode()

    def store(self, store: ArtifactStore, prefix: str, *, redact: Sequence[str]) -> list[Artifact]:
        """Stores all artifacts under `prefix` without the secrets in `redact`; returns one record per kind.

        Raises: ArtifactStoreUnavailable, DiskFull; ArtifactMissing: the earlier logs or recording do not exist.
        """
        jobs = [partial(copy_context().run, self._store_one, store, prefix, kind, redact) for kind in self.kinds]
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # each waits for a disk or a remote store
            return list(pool.map(lambda one: one(), jobs))

    def _store_one(self, store: ArtifactStore, prefix: str, kind: ArtifactKind, redact: Sequence[str]) -> Artifact:
        key = f"{prefix}/{_NAMES[kind]}"
        if kind is ArtifactKind.COMMAND_LOGS and self._logs:
            return _store_logs(self._logs, store, key, redact, self.earlier_logs)
        if kind is ArtifactKind.TERMINAL and self.terminal:
            self._record(store, redact)
        content = self._content(kind, redact)
        if content is None:
            why = _without(self._missing[kind].encode("utf-8", "replace"), redact).decode()
            return Artifact(kind=kind, missing=why)
        url = store.put(key, content)
        digest = hashlib.sha256(content).hexdigest()
        return Artifact(kind=kind, key=key, url=url, size_bytes=len(content), sha256=digest)

    def _record(self, store: ArtifactStore, redact: Sequence[str]) -> None:
        earlier = None if self.earlier_terminal is None else store.get(self.earlier_terminal)
        with self._missing_note(ArtifactKind.TERMINAL):
            self._found[ArtifactKind.TERMINAL] = self.terminal.pack(redact, earlier)

    def _content(self, kind: ArtifactKind, redact: Sequence[str]) -> bytes | None:
        if kind is ArtifactKind.AGENT_FILES:
            return None if self._files is None else zstandard.compress(_packed(self._files, redact))
        content = self._found.get(kind)
        if content is None or kind is ArtifactKind.MODEL_CALLS:  # compressed, and already redacted
            return content
        return _without(content, redact)


def _store_logs(
    logs: CommandLogs, store: ArtifactStore, key: str, redact: Sequence[str], earlier: str | None
) -> Artifact:
    """Stores the logs from a file: they may be larger than a worker's memory. Raises: as `Evidence.store`."""
    before = None if earlier is None else store.get(earlier)
    try:
        packed = logs.pack(redact, before)
        with packed.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        log.warning("evidence.command_logs_not_packed", error=str(error))
        return Artifact(kind=ArtifactKind.COMMAND_LOGS, missing=f"could not be packed: {error}")
    url, size = store.put_file(key, packed), packed.stat().st_size
    return Artifact(kind=ArtifactKind.COMMAND_LOGS, key=key, url=url, size_bytes=size, sha256=digest)


def _without(content: bytes, secrets: Sequence[str]) -> bytes:
    for secret in secrets:
        content = content.replace(secret.encode(), _REDACTED)
    return content


def without_secrets(calls: Sequence[StoredCall], secrets: Sequence[str]) -> list[StoredCall]:
    """Returns the calls with all secrets redacted."""
    # Calls that sent the same message share one object. They must still share it after redaction, done only once.
    seen: dict[int, tuple[Any, Any]] = {}

    def clean(value: Any) -> Any:
        if id(value) not in seen:
            content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
            redacted = _without(content, secrets)
            seen[id(value)] = (value, value if redacted == content else orjson.loads(redacted))
        return seen[id(value)][1]

    return [
        replace(
            call,
            messages=tuple(clean(message) for message in call.messages),
            reply=None if call.reply is None else clean(call.reply),
            tools=tuple(clean(tool) for tool in call.tools),
            **{name: clean(getattr(call, name)) for name in _ALSO_SAID},
        )
        for call in calls
    ]


def _packed(folder: Path, secrets: Sequence[str]) -> bytes:
    buffer, left_out, total = io.BytesIO(), [], 0
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(files, key=lambda path: path.stat().st_size):
            name = path.relative_to(folder).as_posix()
            if total + path.stat().st_size > _MOST_FILES_BYTES:
                left_out.append(f"{name}: {path.stat().st_size} bytes")
                continue
            total += path.stat().st_size
            _add(archive, name, _without(path.read_bytes(), secrets))
        if left_out:
            _add(archive, "LEFT-OUT.txt", "\n".join(left_out).encode("utf-8", "replace"))
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
