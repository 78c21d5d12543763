"""Removes times, ids and ports from texts before they are compared."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from typing import Any

import orjson

from app.model_service.dialects.base import Message

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AP]M)?"

_VOLATILE = re.compile(
    "|".join(
        (
            # Order matters: what holds another kind comes before it.
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
"""Colours, and what a terminal's shell writes or not as it happens to be scheduled."""
_REMEMBERED = 8192


def steady(text: str) -> str:
    """`text` with everything volatile replaced by the name of its kind, and white space at the ends of lines gone."""
    return "\n".join(line.rstrip() for line in _VOLATILE.sub(_kind, _TERMINAL.sub("", text)).split("\n"))


def _kind(found: re.Match[str]) -> str:
    return f"<{found.lastgroup}>"


def steady_message(message: Message) -> str:
    """A message as it is compared: role, words, tool calls; what it thought is left out, for not all send it back."""
    parts = [str(message.get("role")), steady(_text(message.get("content")))]
    for call in message.get("tool_calls") or ():
        parts.append(f"{call.get('name')} {steady(_arguments(str(call.get('arguments') or '')))}")
    return "\n".join(parts).rstrip()


def swap_word(message: Message, swap: tuple[str, str] | None) -> Message:
    """The message with a word read as another wherever it stands."""
    if swap is None:
        return message
    content = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
    word = swap[0].encode()
    return orjson.loads(content.replace(word, swap[1].encode())) if word in content else message


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
    """JSON in one spelling: frameworks send back what they parsed, with their own blanks and order."""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONDecodeError:
        return text


class Digests:
    """Digests of messages by what is steady in them. Conversations grow by their ends, so most are known already."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[bytes, bytes] = OrderedDict()

    def of(self, message: Message, swap: tuple[str, str] | None = None) -> bytes:
        """16 bytes, equal for messages that differ in nothing but what is volatile.

        `swap`: a word to be read as another.
        """
        message = swap_word(message, swap)
        key = hashlib.blake2b(orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS), digest_size=16).digest()
        found = self._known.get(key)
        if found is None:
            found = hashlib.blake2b(steady_message(message).encode("utf-8", "replace"), digest_size=16).digest()
            self._known[key] = found
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return found
