"""Orders an attempt's calls as trees: which call continues which.

Calls do not name their conversation, and harnesses differ: some send everything back unchanged, some write their
model's words anew, some change earlier messages (reminders, cut outputs), some run several conversations at once. A
call continues the call that covers most of its messages, found in one of three ways (`Join`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from app.ledger.model_calls import StoredCall
from app.model_service.dialects.base import Message, as_object, meaning_digest, text_of

_ANSWERS_IN_COMMON = 2
"""Number of equal answers in a row that identify a conversation, even under another system prompt."""


class Join(StrEnum):
    """Relation of a call to the one that it continues; the first of two that cover as much."""

    EXACT = "exact"  # its messages begin with the other's messages and reply
    EDITED = "edited"  # the same answers in the same order, but something else was changed
    REWRITTEN = "rewritten"  # the same messages, then an answer in other words
    NONE = "none"  # it begins a conversation


@dataclass(eq=False)
class Node:
    """An answered call, and its place in the tree."""

    call: StoredCall
    join: Join = Join.NONE
    start: int = 0  # its messages from here on are new
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    repeats: list[StoredCall] = field(default_factory=list)  # the same request, with an unused answer or none


@dataclass
class Forest:
    """Trees of all calls of an attempt."""

    roots: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)  # in the order in which they began
    strays: list[StoredCall] = field(default_factory=list)  # not answered and never repeated, or without messages
    last_prompts: dict[Node, list[Message]] = field(default_factory=dict)
    """New messages after a conversation's last answer, in a call without an answer: refused at a limit, for example."""
    identities: Identities = field(default_factory=lambda: Identities())

    def replies(self) -> set[str]:
        """Returns the identities of the recorded answers."""
        return {self.identities.of(reply) for node in self.nodes if (reply := node.call.reply) is not None}


class Identities:
    """Cache of `meaning_digest` of messages: a conversation's messages are in all of its calls."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Message, str]] = {}  # the message is held, so that its id is not reused

    def of(self, message: Message) -> str:
        cached = self._known.get(id(message))
        if cached is None:
            cached = self._known[id(message)] = (message, meaning_digest(message))
        return cached[1]


def join(calls: Iterable[StoredCall]) -> Forest:
    """Orders an attempt's calls as trees."""
    forest = Forest()
    ordered = sorted(calls, key=lambda call: (call.started_at, str(call.id)))
    index = _Index(forest.identities)
    unanswered: list[tuple[bytes, StoredCall]] = []
    for call in ordered:
        if not call.messages:
            forest.strays.append(call)
        elif call.reply is None:
            unanswered.append((index.prompt_of(call), call))
        else:
            node = index.add_call(call)
            forest.nodes.append(node)
    _drop_repeats(forest, index)
    forest.roots = [node for node in forest.nodes if node.parent is None]
    for prompt, call in unanswered:
        twin = index.by_prompt.get(prompt)
        if twin is None:
            forest.strays.append(call)
            start, parent = index.parent_of(call)
            if parent is not None and not parent.children:
                forest.last_prompts[parent] = list(call.messages[start:])
        else:
            twin.repeats.append(call)
    return forest


def _drop_repeats(forest: Forest, index: _Index) -> None:
    """Keeps, of calls with the same prompt, those that were continued, or else the last complete answer."""
    for nodes in index.groups.values():
        if len(nodes) == 1:
            continue
        survivors = [node for node in nodes if node.children]
        if not survivors:
            whole = [node for node in nodes if node.call.complete] or nodes
            survivors = [whole[-1]]
        for node in nodes:
            if node in survivors:
                continue
            survivors[-1].repeats.append(node.call)
            forest.nodes.remove(node)
            if node.parent is not None:
                node.parent.children.remove(node)
        index.by_prompt[index.prompt_of(nodes[0].call)] = survivors[-1]


class _Index:
    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._by_said: dict[bytes, Node] = {}  # by prompt and reply
        self._by_answers: dict[bytes, Node] = {}
        self.by_prompt: dict[bytes, Node] = {}
        self.groups: dict[bytes, list[Node]] = {}

    def prompt_of(self, call: StoredCall) -> bytes:
        return self._chain(call.messages)[-1]

    def add_call(self, call: StoredCall) -> Node:
        chain = self._chain(call.messages)
        start, parent, way = self._parent(call, chain)
        node = Node(call, way if parent else Join.NONE, start, parent)
        if parent is not None:
            parent.children.append(node)
        self._add(node, chain)
        return node

    def parent_of(self, call: StoredCall) -> tuple[int, Node | None]:
        start, parent, _ = self._parent(call, self._chain(call.messages))
        return start, parent

    def _parent(self, call: StoredCall, chain: list[bytes]) -> tuple[int, Node | None, Join]:
        candidates = [
            self._by_exact_prefix(chain),
            self._by_lineage(call.messages),
            self._by_prompt_alone(chain, call.messages),
        ]
        return max(candidates, key=lambda one: one[0])  # the first of the largest

    def _add(self, node: Node, chain: list[bytes]) -> None:
        reply = node.call.reply
        assert reply is not None
        self._by_said[_next(chain[-1], self._identities.of(reply))] = node
        self.by_prompt[chain[-1]] = node
        self.groups.setdefault(chain[-1], []).append(node)
        for key, _ in self._lineages([*node.call.messages, reply])[-1:]:
            for one in key:
                self._by_answers[one] = node

    def _by_exact_prefix(self, chain: list[bytes]) -> tuple[int, Node | None, Join]:
        for end in range(len(chain) - 1, 0, -1):
            if (node := self._by_said.get(chain[end])) is not None:
                return end, node, Join.EXACT
        return 0, None, Join.EXACT

    def _by_prompt_alone(self, chain: list[bytes], messages: Sequence[Message]) -> tuple[int, Node | None, Join]:
        for end in range(len(messages) - 1, 0, -1):
            if messages[end]["role"] == "assistant" and (node := self.by_prompt.get(chain[end])) is not None:
                return end + 1, node, Join.REWRITTEN
        return 0, None, Join.REWRITTEN

    def _by_lineage(self, messages: Sequence[Message]) -> tuple[int, Node | None, Join]:
        for keys, end in reversed(self._lineages(messages)):
            for key in keys:
                if (node := self._by_answers.get(key)) is not None:
                    return end, node, Join.EDITED
        return 0, None, Join.EDITED

    def _chain(self, messages: Sequence[Message]) -> list[bytes]:
        chain = [b""]
        for message in messages:
            chain.append(_next(chain[-1], self._identities.of(message)))
        return chain

    def _lineages(self, messages: Sequence[Message]) -> list[tuple[list[bytes], int]]:
        """Returns for each answer of a conversation: digests of all answers so far, and the next message's index."""
        system = next((self._identities.of(one) for one in messages if one["role"] == "system"), "")
        under, bare = _next(b"under", system), b"bare"
        lineages: list[tuple[list[bytes], int]] = []
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            who = self._identities.of(message)
            under, bare = _next(under, who), _next(bare, who)
            lineages.append(([under, bare] if len(lineages) + 1 >= _ANSWERS_IN_COMMON else [under], at + 1))
        return lineages


def _next(digest: bytes, word: str) -> bytes:
    return hashlib.blake2b(digest + word.encode(), digest_size=16).digest()


_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
_SUMMARY_CHARACTERS = 60
"""Number of characters of a summary that identify it in another conversation."""
_TASK_CHARACTERS = 20
"""Number of characters of a task that identify it."""


class BranchKind(StrEnum):
    """Role of a branch in the attempt."""

    MAIN = "main"
    FORK = "fork"  # leaves another branch: an answer that was not continued, or another way
    CONTINUATION = "continuation"  # begins with a summary of another branch
    SUB_AGENT = "sub-agent"  # has tools and a task of its own
    SUMMARY = "summary"  # its answer begins a continuation
    ASIDE = "aside"  # a title, a check: no tools, and no recorded effect


@dataclass(frozen=True, slots=True)
class Branch:
    """Calls that continue each other. `number` is 0 for the main branch."""

    number: int
    kind: BranchKind
    nodes: tuple[Node, ...]
    of: int | None = None  # number of the branch that it forks off, continues, or works for
    at: Node | None = None  # the call there
    tool_call_id: str = ""  # the tool call that started a sub-agent


def branches(forest: Forest) -> list[Branch]:
    """Returns all branches, the main one first, the others in the order in which they began."""
    depths: dict[Node, int] = {}
    for node in reversed(forest.nodes):  # children begin after their parents
        depths[node] = 1 + max((depths[child] for child in node.children), default=0)
    # Branches begin at roots, and at children that are not their parent's main continuation.
    heads = [*forest.roots, *(child for node in forest.nodes for child in _next_calls(node, depths)[1:])]
    heads.sort(key=lambda node: (node.call.started_at, str(node.call.id)))
    if not heads:
        return []
    main = max((node for node in heads if node.parent is None), key=lambda root: (_has_tools(root), depths[root]))
    paths = [_path(head, depths) for head in [main, *(head for head in heads if head is not main)]]
    home = {node: number for number, path in enumerate(paths) for node in path}
    return [_branch(number, path, forest, home) for number, path in enumerate(paths)]


def _next_calls(node: Node, depths: dict[Node, int]) -> list[Node]:
    """Sorts a call's continuations: the longest first, of equally long ones the latest, which the harness used."""
    return sorted(node.children, key=lambda child: (depths[child], child.call.started_at), reverse=True)


def _path(head: Node, depths: dict[Node, int]) -> list[Node]:
    path = [head]
    while path[-1].children:
        path.append(_next_calls(path[-1], depths)[0])
    return path


def _branch(number: int, path: Sequence[Node], forest: Forest, home: dict[Node, int]) -> Branch:
    head, nodes = path[0], tuple(path)
    if head.parent is not None:
        return Branch(number, BranchKind.FORK, nodes, home[head.parent], head.parent)
    source = _summary_source(head, forest)
    if source is not None:
        kind = BranchKind.MAIN if number == 0 else BranchKind.CONTINUATION
        before = source.parent or source
        return Branch(number, kind, nodes, home[before], before)
    if number == 0:
        return Branch(0, BranchKind.MAIN, nodes)
    sender, tool_call_id = _sender(head, forest)
    if sender is not None:
        return Branch(number, BranchKind.SUB_AGENT, nodes, home[sender], sender, tool_call_id)
    if any(_summary_source(root, forest) is nodes[-1] for root in forest.roots):
        return Branch(number, BranchKind.SUMMARY, nodes)
    return Branch(number, BranchKind.SUB_AGENT if _has_tools(head) else BranchKind.ASIDE, nodes)


def _has_tools(node: Node) -> bool:
    return bool(node.call.tools)


def _opening(node: Node) -> list[Message]:
    """Returns the messages of a conversation before its first answer, without the system prompt."""
    messages = []
    for message in node.call.messages:
        if message["role"] == "assistant":
            break
        if message["role"] != "system":
            messages.append(message)
    return messages


def _summary_source(head: Node, forest: Forest) -> Node | None:
    opening = "\n".join(text_of(message["content"]) for message in _opening(head))
    for node in reversed(forest.nodes):
        if node is head or node.call.started_at >= head.call.started_at or node.call.reply is None:
            continue
        text = text_of(node.call.reply["content"])
        match = _SUMMARY.search(text)
        words = (match.group(1) if match else text).strip()
        if len(words) >= _SUMMARY_CHARACTERS and words in opening:
            return node
    return None


def _sender(head: Node, forest: Forest) -> tuple[Node | None, str]:
    """Returns the earlier call that gave a sub-agent its task, as an argument of a tool."""
    texts = [text_of(message["content"]).strip() for message in _opening(head)]
    for node in reversed(forest.nodes):
        if node.call.started_at >= head.call.started_at or node.call.reply is None:
            continue
        for call in node.call.reply.get("tool_calls", ()):
            values = [value.strip() for value in as_object(call["arguments"]).values() if isinstance(value, str)]
            if any(_is_task(value, text) for value in values for text in texts):
                return node, str(call["id"])
    return None, ""


def _is_task(argument: str, text: str) -> bool:
    return bool(argument) and (argument == text or (len(argument) >= _TASK_CHARACTERS and argument in text))
