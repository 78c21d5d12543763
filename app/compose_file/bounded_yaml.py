"""Parses untrusted YAML within limits of size and depth.

Aliases and merge keys let a small text become large. Parsing time grows with the square of the depth and of the number
of `%TAG` lines. libyaml does the parsing: the parser in Python takes ten seconds for 3,000 brackets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from app.task_files import read_inside

MAX_BYTES = 1 << 20
MAX_ENTRIES = 20_000
"""Limit for all maps of a document together, counted after merge keys are expanded."""
MAX_EVENTS = 100_000
MAX_DEPTH = 100
MAX_TAGS = 20
_MERGE = "tag:yaml.org,2002:merge"


def read(root: Path, file: Path) -> Any:
    """Reads a file in folder `root` as plain types. Raises: OSError; ValueError: malformed, too large; SpecInvalid."""
    return parse(read_inside(root, file, most=MAX_BYTES))


def parse(content: bytes) -> Any:
    """Parses bytes as YAML into plain types. Raises: ValueError: also for dates and numbers that Python cannot hold."""
    try:
        text = content.decode("utf-8")
        _refuse_deep_and_long(text)
        return yaml.load(text, Loader=_Bounded)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}"[:500]) from error


def _refuse_deep_and_long(text: str) -> None:
    if text.count("%TAG") > MAX_TAGS:
        raise yaml.YAMLError(f"expected at most {MAX_TAGS} %TAG directives; found more")
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.CSafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or count > MAX_EVENTS:
            raise yaml.YAMLError(f"expected at most {MAX_DEPTH} levels and {MAX_EVENTS} parts; found more")


class _Bounded(yaml.CSafeLoader):
    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _Measure().take(node)
        return node


class _Measure:
    """Counts the entries of one document. Visits each node once, however often aliases refer to it."""

    def __init__(self) -> None:
        self._sizes: dict[int, int | None] = {}  # None: being measured
        self._total = 0

    def take(self, node: yaml.Node) -> int:
        """Counts a node's entries, merged ones too. Raises: yaml.YAMLError: too many so far, or it contains itself."""
        if isinstance(node, yaml.ScalarNode):
            return 0
        known = self._sizes.setdefault(id(node), -1)
        if known is None:
            raise yaml.YAMLError(f"expected at most {MAX_ENTRIES} entries; found one that holds itself")
        return known if known >= 0 else self._measured(node)

    def _measured(self, node: yaml.Node) -> int:
        self._sizes[id(node)] = None
        if isinstance(node, yaml.MappingNode):
            size = sum(self._entry(name, value) for name, value in node.value)
            self._total += size
        else:
            size = sum(self.take(one) for one in node.value)
        if max(size, self._total) > MAX_ENTRIES:
            raise yaml.YAMLError(f"expected at most {MAX_ENTRIES} entries, with what is merged; found more")
        self._sizes[id(node)] = size
        return size

    def _entry(self, name: yaml.Node, value: yaml.Node) -> int:
        self.take(name)
        inside = self.take(value)
        return inside if name.tag == _MERGE else 1
