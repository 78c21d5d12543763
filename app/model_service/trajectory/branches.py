"""Splits trees of calls into branches: main conversation, sub-agents, side calls, forks, summaries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from app.model_service.dialects.base import Message, as_object, text_of
from app.model_service.trajectory.tree import Forest, Node

_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
_SUMMARY_CHARACTERS = 60
"""Characters of a summary that identify it in another conversation."""
_TASK_CHARACTERS = 20
"""Characters of a task that identify it."""


class BranchKind(StrEnum):
    """What a branch is to the attempt."""

    MAIN = "main"
    FORK = "fork"  # leaves another branch: an answer that was not gone on from, or another way
    CONTINUATION = "continuation"  # begins with a summary of another branch
    SUB_AGENT = "sub-agent"  # has tools and a task of its own
    SUMMARY = "summary"  # what it answered begins a continuation
    ASIDE = "aside"  # a title, a check: no tools, and nothing comes of it that was recorded


@dataclass(frozen=True, slots=True)
class Branch:
    """Calls that go on from each other. `number` is 0 for the main one."""

    number: int
    kind: BranchKind
    nodes: tuple[Node, ...]
    of: int | None = None  # number of the branch that it forks off, goes on from, or works for
    at: Node | None = None  # the call there
    tool_call_id: str = ""  # by which a sub-agent was sent


def branches(forest: Forest) -> list[Branch]:
    """All branches, the main one first, the others in the order in which they began."""
    depths: dict[Node, int] = {}
    for node in reversed(forest.nodes):  # children begin after their parents
        depths[node] = 1 + max((depths[child] for child in node.children), default=0)
    # Branches begin at roots, and at children that are not their parent's main way.
    heads = [*forest.roots, *(child for node in forest.nodes for child in _next_calls(node, depths)[1:])]
    heads.sort(key=lambda node: (node.call.started_at, str(node.call.id)))
    if not heads:
        return []
    main = max((node for node in heads if node.parent is None), key=lambda root: (_has_tools(root), depths[root]))
    paths = [_path(head, depths) for head in [main, *(head for head in heads if head is not main)]]
    home = {node: number for number, path in enumerate(paths) for node in path}
    return [_branch(number, path, forest, home) for number, path in enumerate(paths)]


def _next_calls(node: Node, depths: dict[Node, int]) -> list[Node]:
    """The longest way first, of equally long ones the latest: it is the one that the harness went."""
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
    told = _summary_source(head, forest)
    if told is not None:
        kind = BranchKind.MAIN if number == 0 else BranchKind.CONTINUATION
        before = told.parent or told
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
    """What was said to a conversation before its first answer, but for the system prompt."""
    found = []
    for message in node.call.messages:
        if message["role"] == "assistant":
            break
        if message["role"] != "system":
            found.append(message)
    return found


def _summary_source(head: Node, forest: Forest) -> Node | None:
    opening = "\n".join(text_of(message["content"]) for message in _opening(head))
    for node in reversed(forest.nodes):
        if node is head or node.call.started_at >= head.call.started_at or node.call.reply is None:
            continue
        said = text_of(node.call.reply["content"])
        marked = _SUMMARY.search(said)
        words = (marked.group(1) if marked else said).strip()
        if len(words) >= _SUMMARY_CHARACTERS and words in opening:
            return node
    return None


def _sender(head: Node, forest: Forest) -> tuple[Node | None, str]:
    """The earlier call that gave a sub-agent its task: as an argument of a tool."""
    asked = [text_of(message["content"]).strip() for message in _opening(head)]
    for node in reversed(forest.nodes):
        if node.call.started_at >= head.call.started_at or node.call.reply is None:
            continue
        for call in node.call.reply.get("tool_calls", ()):
            values = [value.strip() for value in as_object(call["arguments"]).values() if isinstance(value, str)]
            if any(_is_task(value, text) for value in values for text in asked):
                return node, str(call["id"])
    return None, ""


def _is_task(argument: str, text: str) -> bool:
    return bool(argument) and (argument == text or (len(argument) >= _TASK_CHARACTERS and argument in text))
