"""Writes model calls in bulk, reads them back, and sums them up.

A call's row names its messages by digest; each message of an attempt is stored once, however often it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
import zstandard
from sqlalchemy import Connection, text
from sqlalchemy.dialects import postgresql

from app.ledger.model_usage import SUMS, WAITED
from app.models.model_calls import Account, CallEnd, Dialect, TokenUse, VersionSpan
from app.models.service_tables import ModelCallRow

STOPS = frozenset({CallEnd.STEP_LIMIT, CallEnd.BUDGET_EXHAUSTED, CallEnd.RUN_BUDGET, CallEnd.CONTEXT_EXHAUSTED})
"""Ends after which an attempt gets no further answers."""
_MOST_TEXT = 2000
"""Characters stored of a name or a detail."""
_MOST_UNPACKED = 512 << 20
_INT_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call to be stored: `facts` by column, and its messages (and tools), packed, by digest."""

    facts: Mapping[str, Any]
    messages: Mapping[str, bytes] = field(default_factory=dict)
    settles_turns: bool = False  # may be the attempt's first call with tools: its calls without tools are no turns then


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A stored call with its messages, which have the normal form of `app.model_service.dialects`."""

    id: UUID
    attempt_id: UUID
    dialect: Dialect
    model: str
    started_at: datetime
    end: CallEnd
    is_turn: bool = False
    upstream_model: str = ""
    replica: str = ""
    policy_version: str = ""
    first_byte_s: float | None = None
    duration_s: float = 0.0
    waited_s: Mapping[str, float] = field(default_factory=dict)
    retries: int = 0
    streamed: bool = False
    status: int | None = None
    detail: str = ""
    finish_reason: str = ""
    use: TokenUse = field(default_factory=TokenUse)
    cost_usd: float | None = None
    scripted: bool = False  # answered by a replay engine
    sampling: Mapping[str, Any] = field(default_factory=dict)  # `applied`, `dropped`: as `Sampled` describes itself
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    reply: dict[str, Any] | None = None
    complete: bool = True  # False: the answer was cut
    max_tokens: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    versions: tuple[VersionSpan, ...] = ()  # of its tokens
    raw: Mapping[str, str] = field(default_factory=dict)  # `request`, `response`: unreadable bodies, unchanged
    lost: str = ""  # why messages and reply are missing


def packed(value: object) -> bytes:
    """Packs a value for the tables: zstd of JSON."""
    return zstandard.compress(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def unpacked(content: bytes) -> Any:
    """Raises: ValueError."""
    try:
        return orjson.loads(zstandard.ZstdDecompressor().decompress(content, max_output_size=_MOST_UNPACKED))
    except zstandard.ZstdError as error:
        raise ValueError(f"expected zstd of JSON; found: {error}") from error


_TYPES = {
    column.name: "text" if column.name == "messages" else str(column.type.compile(postgresql.dialect()))  # type: ignore[no-untyped-call]
    for column in ModelCallRow.__table__.columns
}
"""Columns with their types; messages are passed as array literals: an array of arrays needs rows of equal length."""
_STORE_CALLS = text(
    f"INSERT INTO model_calls ({', '.join(_TYPES)})"  # noqa: S608
    f" SELECT {', '.join('messages::text[]' if name == 'messages' else name for name in _TYPES)} FROM unnest("
    + ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in _TYPES.items())
    + f") AS given({', '.join(_TYPES)}) ON CONFLICT (id) DO NOTHING"
)
_STORE_MESSAGES = text("""
INSERT INTO model_messages (attempt_id, digest, body)
SELECT * FROM unnest(CAST(:attempts AS uuid[]), CAST(:digests AS text[]), CAST(:bodies AS bytea[]))
ON CONFLICT (attempt_id, digest) DO NOTHING
""")

_SETTLE_TURNS = text("""
UPDATE model_calls c SET is_turn = false
WHERE c.attempt_id = ANY(CAST(:attempts AS uuid[])) AND c.is_turn AND NOT c.offers_tools AND EXISTS (
    SELECT FROM model_calls o WHERE o.attempt_id = c.attempt_id AND o.offers_tools AND o.end_kind = 'answered')
""")


# Lock order: attempts, then tasks. A task takes the `scripted` mark of its graded attempt: at the attempt's end, or
# here when a call is stored late.
_MARK_ATTEMPTS = text("""
WITH unmarked AS (
    SELECT id FROM attempts WHERE id = ANY(CAST(:attempts AS uuid[])) AND NOT scripted ORDER BY id FOR NO KEY UPDATE
)
UPDATE attempts a SET scripted = true FROM unmarked u WHERE a.id = u.id
""")
_MARK_TASKS = text("""
WITH unmarked AS (
    SELECT t.id FROM tasks t JOIN attempts a ON a.task_id = t.id AND a.number = t.attempts
    WHERE a.id = ANY(CAST(:attempts AS uuid[])) AND a.verdict IS NOT NULL AND NOT t.scripted
    ORDER BY t.id FOR NO KEY UPDATE OF t
)
UPDATE tasks t SET scripted = true FROM unmarked u WHERE t.id = u.id
""")


def store(connection: Connection, calls: Sequence[NewCall]) -> None:
    """Stores calls, one statement for all; calls that are stored already do not change."""
    messages = {(call.facts["attempt_id"], digest): body for call in calls for digest, body in call.messages.items()}
    if messages:
        ordered = sorted(messages)  # all writers lock rows in the same order
        values = {
            "attempts": [attempt for attempt, _ in ordered],
            "digests": [digest for _, digest in ordered],
            "bodies": [messages[key] for key in ordered],
        }
        connection.execute(_STORE_MESSAGES, values)
    if calls:
        columns = {name: [_plain(name, call.facts.get(name)) for call in calls] for name in _TYPES}
        connection.execute(_STORE_CALLS, columns)
    if scripted := sorted({call.facts["attempt_id"] for call in calls if call.facts.get("scripted")}):
        connection.execute(_MARK_ATTEMPTS, {"attempts": scripted})
        connection.execute(_MARK_TASKS, {"attempts": scripted})
    if settled := sorted({call.facts["attempt_id"] for call in calls if call.settles_turns}):
        connection.execute(_SETTLE_TURNS, {"attempts": settled})


def _plain(name: str, value: Any) -> Any:
    if name == "waited":
        return orjson.dumps(value or {}).decode()
    if name in ("offers_tools", "scripted"):
        return bool(value)
    if _TYPES[name] == "INTEGER" and value is not None:
        return max(-_INT_MOST, min(value, _INT_MOST))  # engines may report any number
    if name == "messages":
        return "{" + ",".join(value or ()) + "}"
    if _TYPES[name] not in ("text", "TEXT") or value is None:
        return value
    # PostgreSQL's text has no NUL, and UTF-8 no halves of surrogate pairs.
    return str(value)[:_MOST_TEXT].replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


_FORGET_MESSAGES = text("DELETE FROM model_messages WHERE attempt_id = :attempt")
_FORGET_BODIES = text(
    "UPDATE model_calls SET body = '', messages = '{}', reply = NULL WHERE attempt_id = :attempt AND body <> ''"
)


def forget_messages(connection: Connection, attempt_id: UUID) -> None:
    """Deletes the content of an attempt's calls, which is in its artifacts now; counts, times and costs stay."""
    connection.execute(_FORGET_MESSAGES, {"attempt": attempt_id})
    connection.execute(_FORGET_BODIES, {"attempt": attempt_id})


_CALLS = text("SELECT * FROM model_calls WHERE attempt_id = :attempt ORDER BY started_at DESC, id DESC LIMIT :newest")
_MESSAGES = text("SELECT digest, body FROM model_messages WHERE attempt_id = :attempt")
FORGOTTEN = "forgotten: the artifact `model_calls` has it"


def calls_of(connection: Connection, attempt_id: UUID, newest: int | None = None) -> list[StoredCall]:
    """Returns all calls of an attempt, or the newest ones, in the order in which they began, with their messages."""
    rows = connection.execute(_CALLS, {"attempt": attempt_id, "newest": newest}).all()[::-1]
    bodies = connection.execute(_MESSAGES, {"attempt": attempt_id}).all()
    messages = {row.digest: unpacked(row.body) for row in bodies}
    return [_call(row, messages) for row in rows]


def _call(row: Any, said: Mapping[str, Any]) -> StoredCall:
    body = unpacked(row.body) if row.body else {"lost": FORGOTTEN}
    missing = [digest for digest in (*row.messages, row.reply) if digest is not None and digest not in said]
    if missing:
        body = {**body, "lost": f"{len(missing)} of its messages are not in the ledger"}
    values = {name: getattr(row, name) for name in _AS_STORED}
    return StoredCall(
        **values,
        dialect=Dialect(row.dialect),
        end=CallEnd(row.end_kind),
        waited_s=row.waited,
        use=TokenUse(row.prompt_tokens, row.completion_tokens, row.cached_tokens, row.reasoning_tokens),
        messages=() if missing else tuple(said[digest] for digest in row.messages),
        reply=said.get(row.reply) if row.reply else None,
        **said_in(body, said),
    )


_AS_STORED = (_TYPES.keys() & StoredCall.__dataclass_fields__.keys()) - {"dialect", "messages", "reply"}


def said_in(body: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `StoredCall` that a call's unpacked body has. said: unpacked messages by digest."""
    fields: dict[str, Any] = {"tools": tuple(said.get(body.get("tools") or "") or ())}
    for name in ("complete", "max_tokens", "parameters", "sampling", "raw", "lost"):
        if name in body:
            fields[name] = body[name]
    for name in ("prompt_token_ids", "token_ids", "logprobs"):
        if body.get(name) is not None:
            fields[name] = tuple(body[name])
    fields["versions"] = tuple(VersionSpan(**one) for one in body.get("versions", ()))
    return fields


_ACCOUNT = text(f"SELECT {SUMS} FROM model_calls c {WAITED} WHERE c.attempt_id = :attempt")  # noqa: S608
_ENDS = text(
    "SELECT end_kind, offers_tools, cost_usd FROM model_calls WHERE attempt_id = :attempt ORDER BY started_at, id"
)
_RUN_BUDGET = text("SELECT budget_usd FROM runs WHERE id = :run")
_RUN_SPENT = text("SELECT coalesce(sum(cost_usd), 0) FROM model_calls WHERE run_id = :run")


def account_of(connection: Connection, attempt_id: UUID) -> Account:
    """Sums up an attempt's model calls, as far as they are in the ledger."""
    row = connection.execute(_ACCOUNT, {"attempt": attempt_id}).one()
    calls = connection.execute(_ENDS, {"attempt": attempt_id}).all()
    ends = [CallEnd(call.end_kind) for call in calls]
    offered = any(call.offers_tools and call.end_kind == CallEnd.ANSWERED for call in calls)
    turn_ends = [
        end
        for end, call in zip(ends, calls, strict=True)
        if end is not CallEnd.CLIENT_GONE and (call.offers_tools or not offered)
    ]
    return Account(
        **row._mapping,
        last_end=ends[-1] if ends else None,
        turn_end=turn_ends[-1] if turn_ends else None,
        stopped_by=next((end for end in ends if end in STOPS), None),
        offered_tools=offered,
        last_cost_usd=next((call.cost_usd for call in reversed(calls) if call.cost_usd), 0.0),
    )


def run_spend(connection: Connection, run_id: UUID) -> tuple[float, float | None]:
    """Returns US dollars of a run's calls whose price is known, and its budget; 0 and None without a budget."""
    budget = connection.execute(_RUN_BUDGET, {"run": run_id}).scalar()
    if budget is None:
        return 0.0, None
    return float(connection.execute(_RUN_SPENT, {"run": run_id}).scalar_one()), budget
