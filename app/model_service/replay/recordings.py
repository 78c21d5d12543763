"""Finds the recorded answer to a request.

A recording is a folder with one file per attempt, in the format of the `model_calls` artifact; `file_name` names it.
Only digests of the conversations stay in memory. Nothing is consumed: the same request gets the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from app.ledger.model_calls import StoredCall
from app.model_service.dialects.base import Message, Reply, Request
from app.model_service.replay.player import ReplayAnswer
from app.model_service.replay.script import name_list
from app.model_service.serving import CallRefusal
from app.model_service.trajectory import read
from app.models.model_calls import CallEnd

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AP]M)?"

_VOLATILE = re.compile(
    "|".join(
        (
            # Order matters: a kind that contains another comes before it.
            r"(?P<uuid>\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b)",
            rf"(?P<time>\b\d{{4}}-\d{{2}}-\d{{2}}(?:[T _]{_CLOCK}(?:\s?Z|\s?[+-]\d{{2}}:?\d{{2}})?)?\b"
            rf"|\b(?:{_DAY},?\s+)?(?:{_MONTH}\s+\d{{1,2}}|\d{{1,2}}\s+{_MONTH})"
            rf"(?:,?\s+(?:{_CLOCK}|\d{{4}}\b))*(?:\s+(?:[A-Z]{{3,4}}\b|[+-]\d{{4}}))?(?:\s+\d{{4}}\b)?"
            rf"|\b\d{{1,2}}/\d{{1,2}}/\d{{4}}\b|\b\d{{2}}:\d{{2}}:\d{{2}}(?:[.,]\d+)?)",
            r"(?P<address>\b0x[0-9a-fA-F]{6,16}\b)",
            r"(?P<scratch>/(?:var/)?tmp(?:/[\w.+@~-]+)+|/dev/shm(?:/[\w.+@~-]+)+|/proc/\d+)",
            r"(?P<port>(?<=localhost:)\d{2,5}\b|(?<=\d\.\d\.\d\.\d:)\d{2,5}\b|(?<=\d\.0\.0\.1:)\d{2,5}\b"
            r"|(?<=\bport )\d{2,5}\b)",
            r"(?P<pid>(?<=\bpid[ =:])\s?\d+\b|(?<=\bPID[ =:])\s?\d+\b|(?<=\[)\d{2,7}(?=\]:? ))",
            r"(?P<duration>\b\d{1,6}(?:\.\d+)?(?:e-?\d+)?\s?(?:milliseconds?|microseconds?|seconds?|minutes?|hours?"
            r"|secs?|mins?|[munµ]s|s|m|h)\b(?:\s?\d+(?:\.\d+)?\s?(?:ms|s|m)\b)*)",
            r"(?P<hex>\b(?=[0-9a-f]*\d)[0-9a-f]{7,64}\b|\b(?=[0-9A-F]*\d)[0-9A-F]{12,64}\b)",
            # Ids as providers and frameworks make them: a word, then letters and digits at random.
            r"(?P<id>\b(?:call|toolu|msg|req|chatcmpl|resp|fc|rs|sess|run)[_-][A-Za-z0-9_-]{6,}\b)",
        )
    )
)
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours, and control characters that a terminal's shell writes or not, depending on timing."""
_REMEMBERED = 8192


def steady(text: str) -> str:
    """Replaces everything volatile in `text` by the name of its kind, and strips white space at the ends of lines."""
    return "\n".join(line.rstrip() for line in _VOLATILE.sub(_kind, _TERMINAL.sub("", text)).split("\n"))


def _kind(found: re.Match[str]) -> str:
    return f"<{found.lastgroup}>"


def _steady_message(message: Message) -> str:
    """Returns a message's text for comparison: role, words, tool calls; no thoughts, as not all clients return them."""
    parts = [str(message.get("role")), steady(_text(message.get("content")))]
    for call in message.get("tool_calls") or ():
        parts.append(f"{call.get('name')} {steady(_arguments(str(call.get('arguments') or '')))}")
    return "\n".join(parts).rstrip()


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return orjson.dumps(part, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()


def _arguments(text: str) -> str:
    """Normalises JSON: frameworks send back what they parsed, with their own blanks and order."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONDecodeError:
        return text


class Digests:
    """Cache of digests of messages without their volatile parts. Conversations grow at the end, so most are cached."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bytes] = OrderedDict()

    def of(self, message: Message, swap: tuple[str, str] | None = None) -> bytes:
        """Returns 16 bytes, equal for messages that differ only in volatile parts.

        `swap`: a word and its replacement, everywhere in the message.
        """
        content = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
        if swap is not None:
            content = content.replace(swap[0].encode(), swap[1].encode())
        key = hashlib.blake2b(content, digest_size=16).digest()
        digest = self._known.get(key)
        if digest is None:
            steadied = _steady_message(orjson.loads(content)).encode("utf-8", "replace")
            digest = self._known[key] = hashlib.blake2b(steadied, digest_size=16).digest()
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return digest


SUFFIX = ".jsonl.zst"
_CACHED_FILES = 256
"""Number of attempts in memory; others are read again when they are needed."""


def file_name(task: str, replica: int, agent: str = "") -> str:
    """Returns the name of an attempt's file within its recording; a run may have given a task to several agents."""
    by = f"--{quote(agent, safe='')}" if agent else ""
    return f"{quote(task, safe='')}--{replica}{by}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call whose response can be replayed."""

    request: Request
    response: Reply | CallRefusal


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Key by which conversations are compared."""

    tools: frozenset[str]
    """Names of the offered tools: a framework's main conversation, its sub-agents and its asides differ in them."""
    messages: tuple[bytes, ...]
    """Digests of the messages without their volatile parts."""
    answers: int
    """Number of the assistant's messages."""
    task: tuple[bytes, ...]
    """The user's messages before the first answer. System messages may name folders that are new each time."""

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(b"".join((*sorted(map(str.encode, self.tools)), b"|", *self.messages))).digest()


def conversation_key(request: Request, digests: Digests, swap: tuple[str, str] | None = None) -> ConversationKey:
    """Returns the key of a request. `swap`: a word and its replacement, for the model's own name."""
    messages = tuple(digests.of(message, swap) for message in request.messages)
    assistant = [at for at, message in enumerate(request.messages) if message.get("role") == "assistant"]
    first = assistant[0] if assistant else len(messages)
    return ConversationKey(
        tools=frozenset(str(tool["name"]) for tool in request.tools),
        messages=messages,
        answers=len(assistant),
        task=tuple(messages[at] for at in range(first) if request.messages[at].get("role") == "user"),
    )


class RecordedAttempt:
    """The calls of one attempt, by conversation. Pure."""

    def __init__(self, calls: Iterable[RecordedCall], digests: Digests) -> None:
        calls = list(calls)
        self._calls = [(conversation_key(call.request, digests), call.response) for call in calls]
        # If several calls have the same conversation, the last counts: the agent continued with its answer.
        self._exact = {key.digest: response for key, response in self._calls}
        self.model = next((call.request.model for call in calls), "")
        self.tasks = frozenset(key.task for key, _ in self._calls if key.task)

    def exact(self, key: ConversationKey) -> Reply | CallRefusal | None:
        """Returns the answer to exactly this conversation."""
        return self._exact.get(key.digest)

    def by_position(self, key: ConversationKey) -> Reply | CallRefusal | None:
        """Returns the answer at the same point of the most similar conversation with the same tools."""
        candidates = [
            (common(known.messages, key.messages), known.messages[-1:] == key.messages[-1:], at)
            for at, (known, _) in enumerate(self._calls)
            if known.tools == key.tools and known.answers == key.answers
        ]
        return self._calls[max(candidates)[2]][1] if candidates else None


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Counts the entries that two sequences share from their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def read_calls(path: Path) -> list[RecordedCall]:
    """Reads the calls of an attempt that can be replayed, in the order in which they were made.

    Raises: OSError; ValueError: not an export of model calls.
    """
    return list(_playable(read(path.read_bytes())))


def _playable(calls: list[StoredCall]) -> Iterator[RecordedCall]:
    for call in calls:
        if call.lost or not call.messages or (response := _response(call)) is None:
            continue
        request = Request(
            model=call.model,
            messages=call.messages,
            tools=call.tools,
            stream=call.streamed,
            max_tokens=call.max_tokens,
            parameters=dict(call.parameters),
        )
        yield RecordedCall(request, response)


def _response(call: StoredCall) -> Reply | CallRefusal | None:
    """Returns the response of a call. None: a temporary fault. A refusal depends on the request, so it repeats."""
    if call.end is CallEnd.ANSWERED and call.reply is not None and call.complete:
        return Reply(
            message=call.reply,
            finish_reason=call.finish_reason,
            usage=call.use,
            model=call.upstream_model,
            prompt_token_ids=call.prompt_token_ids,
            token_ids=call.token_ids,
            logprobs=call.logprobs,
        )
    if call.end in (CallEnd.REFUSED, CallEnd.CONTEXT_EXHAUSTED) and call.status is not None and call.upstream_model:
        code = "context_length_exceeded" if call.end is CallEnd.CONTEXT_EXHAUSTED else "recorded_refusal"
        return CallRefusal(call.status, code, _refusal_message(call))
    return None


def _refusal_message(call: StoredCall) -> str:
    content = call.raw.get("response", "")
    try:
        error = orjson.loads(content)["error"]
        return str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return content or call.detail or f"HTTP {call.status}"


@dataclass(frozen=True, slots=True)
class Caller:
    """The calling attempt, as far as the gateway's headers name it."""

    task: str | None = None
    replica: int | None = None
    agent: str = ""


class Recordings:
    """The recorded runs below one folder. For one event loop."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._digests = Digests()
        self._attempts: OrderedDict[Path, tuple[int, RecordedAttempt]] = OrderedDict()
        self._reading = asyncio.Lock()

    def names(self) -> list[str]:
        """Returns the names of the runs that can be replayed."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(path.name for path in self._folder.iterdir() if path.is_dir())

    async def answer(self, run: str, request: Request, caller: Caller, *, scripts: Sequence[str] = ()) -> ReplayAnswer:
        """Returns the recorded answer to this conversation, else the one at this point of an attempt of the same task.

        Raises: CallRefusal: no such recording, or nothing in it that fits.
        """
        files, same_task = self._files(run, caller, scripts)
        attempts = [await self._attempt(path) for path in files]
        # Frameworks write the model's name into their prompts; in the replay it is another than in the recording.
        models = {attempt.model for attempt in attempts}
        keys = {model: conversation_key(request, self._digests, _swap(run, model)) for model in models}
        compared = [(attempt, keys[attempt.model]) for attempt in attempts]
        for attempt, key in compared:
            if (response := attempt.exact(key)) is not None:
                return _answer(response, key, "exact")
        for attempt, key in compared:
            if (same_task or key.task in attempt.tasks) and (response := attempt.by_position(key)) is not None:
                return _answer(response, key, "position")
        who = f"task {caller.task!r}, replica {caller.replica}" if caller.task else "a caller of no known task"
        raise CallRefusal(
            404,
            "recording_miss",
            f"expected a conversation that recording {run!r} holds; found none for {who} with {len(request.messages)} "
            f"messages in {files[0].name}{f' and {len(files) - 1} other files' if len(files) > 1 else ''}",
        )

    def _files(self, run: str, caller: Caller, scripts: Sequence[str]) -> tuple[list[Path], bool]:
        folder = self._folder / run if self._folder is not None and run not in ("", ".", "..") else None
        if folder is None or not folder.is_dir():
            raise CallRefusal(
                404,
                "recording_unknown",
                f"expected the name of a recorded run or of a script after 'replay:'; found {run!r}; "
                f"known recordings: {name_list(self.names())}; known scripts: {name_list(scripts)}; "
                "`megaflow record RUN` makes one",
            )
        if caller.task is not None and caller.replica is not None:
            for agent in (caller.agent, ""):
                own = folder / file_name(caller.task, caller.replica, agent)
                if own.is_file():
                    return [own], True
        every = sorted(folder.glob(f"*{SUFFIX}"))
        if not every:
            raise CallRefusal(404, "recording_empty", f"expected files *{SUFFIX} in recording {run!r}; found none")
        of_task = [path for path in every if caller.task and path.name.startswith(f"{quote(caller.task, safe='')}--")]
        return of_task or every, bool(of_task)

    async def _attempt(self, path: Path) -> RecordedAttempt:
        async with self._reading:
            try:
                changed_at = path.stat().st_mtime_ns
                cached = self._attempts.get(path)
                if cached is None or cached[0] != changed_at:
                    attempt = await asyncio.to_thread(lambda: RecordedAttempt(read_calls(path), Digests()))
                    cached = self._attempts[path] = (changed_at, attempt)
            except (OSError, ValueError) as error:
                raise CallRefusal(
                    400,
                    "recording_unreadable",
                    f"expected {path.name} to be a recorded attempt; found: {error}; record the run again",
                ) from error
            self._attempts.move_to_end(path)
            while len(self._attempts) > _CACHED_FILES:
                self._attempts.popitem(last=False)
            return cached[1]


def _swap(run: str, model: str) -> tuple[str, str] | None:
    return (f"replay:{run}", model) if model else None


def _answer(response: Reply | CallRefusal, key: ConversationKey, source: str) -> ReplayAnswer:
    # Claude Code treats answers with one id as pieces of one message.
    return ReplayAnswer(response, key.digest.hex()[:24], source=source)
