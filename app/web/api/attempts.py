"""Operations on attempts: explanations of where time went, artifacts with byte ranges."""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import UUID

from starlette.responses import JSONResponse, RedirectResponse, Response

from app.errors import ArtifactMissing, SpecInvalid, UnknownName
from app.ledger import explain_run
from app.ledger.database import sql
from app.ledger.stories import RunStory, TaskStory
from app.models.outcome import Artifact, ArtifactKind
from app.models.wire import Wire
from app.web.api.operation import Operations
from app.web.calls import WebCall

operations = Operations()

_LINK_S = 300.0
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_FIELDS = ", ".join(f"s.{name}" for name in Artifact.model_fields)
TEXT_KINDS = frozenset(
    {
        ArtifactKind.PATCH,
        ArtifactKind.AGENT_LOG,
        ArtifactKind.TEST_REPORT,
        ArtifactKind.ENVIRONMENT_LOG,
        ArtifactKind.STEP_DIFFS,
    }
)
_JSON = frozenset({ArtifactKind.TRAJECTORY, ArtifactKind.VERDICT})


@dataclass(frozen=True, slots=True)
class AttemptPlace:
    """The task and run of an attempt."""

    attempt_id: UUID
    task_id: UUID
    run_id: UUID
    number: int


def attempt_of(call: WebCall) -> AttemptPlace:
    """Returns the attempt that the path names. Raises: UnknownName: none, or of another user's task."""
    name = call.path["attempt"]
    try:
        attempt_id = UUID(name)
    except ValueError:
        raise UnknownName(f"expected the id of an attempt, found {name[:80]!r}") from None
    statement = """
        SELECT a.task_id, t.run_id, a.number, t.user_name FROM attempts a JOIN tasks t ON t.id = a.task_id
        WHERE a.id = :id"""
    with call.database.begin() as connection:
        row = sql(connection, statement, {"id": attempt_id}).first()
    if row is None or not (call.caller.administers or row.user_name == call.caller.user_name):
        raise UnknownName(f"unknown attempt {name!r}")
    return AttemptPlace(attempt_id, row.task_id, row.run_id, row.number)


def artifact_of(call: WebCall, attempt_id: UUID, kind: str) -> Artifact:
    """Raises: UnknownName: no such kind; ArtifactMissing: the attempt has none."""
    if kind not in set(ArtifactKind):
        raise UnknownName.of("kind of artifact", kind, list(ArtifactKind))
    with call.database.begin() as connection:
        statement = f"SELECT {_FIELDS} FROM artifacts s WHERE attempt_id = :id AND kind = :kind"  # noqa: S608
        row = sql(connection, statement, {"id": attempt_id, "kind": kind}).first()
    if row is None:
        raise ArtifactMissing(f"expected an artifact of the kind {kind!r} of this attempt, found none")
    return Artifact.model_validate(row._asdict())


def content_of(call: WebCall, artifact: Artifact) -> bytes:
    """Raises: ArtifactMissing: there are no bytes, with the reason; ArtifactStoreUnavailable."""
    if artifact.key is None:
        why = artifact.missing or "none were left"
        raise ArtifactMissing(f"the artifact {artifact.kind.value} has no bytes: {why}")
    return call.services.store.get(artifact.key)


@operations.get("/runs/{run}/explanation", RunStory)
def explain_a_run(call: WebCall) -> RunStory:
    """Explains where a run's time went, and what delays the rest."""
    return explain_run.run(call.database, call.services.settings, call.run())


@operations.get("/tasks/{task}/explanation", TaskStory)
def explain_a_task(call: WebCall) -> TaskStory:
    """Explains what a task does or waits for, with the phases of its attempts."""
    return call.story(call.task())


class ArtifactQuery(Wire):
    """Options of a download. link: redirect to a link into the store for a large artifact, as for browsers."""

    link: bool = False


@operations.get(
    "/attempts/{attempt}/artifacts/{kind}", bytes, query=ArtifactQuery, media_type="application/octet-stream"
)
def get_artifact(call: WebCall) -> Response:
    """Returns the bytes of an artifact, or a range of them."""
    artifact = artifact_of(call, attempt_of(call).attempt_id, call.path["kind"])
    if (link := _link(call, artifact)) is not None:
        return RedirectResponse(link, 302, headers={"Cache-Control": "no-store"})
    content, byte_range = content_of(call, artifact), call.headers.get("range", "")
    return ranged(content, byte_range, _media_type(artifact.kind), artifact.sha256)


def _link(call: WebCall, artifact: Artifact) -> str | None:
    """Returns a link to a large artifact, for a browser that follows a click or a caller that requests a link.

    All others get the bytes: scripts of pages may ask no other server, and MegaFlow's clients follow no redirection.
    """
    above = call.services.settings.artifact_links_bytes
    clicked = call.headers.get("sec-fetch-mode") == "navigate"
    if not above or artifact.key is None or (artifact.size_bytes or 0) <= above or not (clicked or call.query.link):
        return None
    return call.services.store.link(artifact.key, _LINK_S)


def _media_type(kind: ArtifactKind) -> str:
    """Returns the media type, which is never HTML: a browser must run nothing that an agent wrote."""
    if kind in TEXT_KINDS:
        return "text/plain; charset=utf-8"
    return "application/json" if kind in _JSON else "application/octet-stream"


def ranged(content: bytes, asked: str, media_type: str, sha256: str | None) -> Response:
    """Returns the whole content, or the one range that the header names; 416 if the range has no bytes."""
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{sha256}"'} if sha256 else {"Accept-Ranges": "bytes"}
    if not asked.startswith("bytes=") or "," in asked:  # another unit, or several ranges: all of it is allowed
        return Response(content, media_type=media_type, headers=headers)
    match, size = _RANGE.fullmatch(asked), len(content)
    first, last = match.groups() if match else ("", "")
    begin = int(first) if first else max(0, size - int(last or 0))
    end = min(size, int(last) + 1) if first and last else size
    if begin >= end:
        message = f"expected a range within {size} bytes, found {asked[:80]!r}"
        error = {"error": {"type": SpecInvalid.__name__, "message": message}}
        return JSONResponse(error, 416, {**headers, "Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    return Response(content[begin:end], status_code=206, media_type=media_type, headers=headers)
