"""Every parser of what others wrote: any input ends in a value or in an error that has a name, never in another."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.agents.external import manifest
from app.agents.external.framework import ending as external_ending
from app.agents.framework import Ended, Stop
from app.agents.stream_json import read_object, result
from app.artifacts.bundles import pack
from app.compose_file import bounded_yaml
from app.compose_file.file import read_project
from app.datasets.base import Reading, Row
from app.datasets.faults import FaultPlace
from app.datasets.rows import ADAPTERS
from app.errors import MegaFlowError, SpecInvalid
from app.grading import script_goal
from app.grading.reports import PARSERS
from app.host import archives
from app.images.references import Reference
from app.model_service.dialects import codec_for
from app.model_service.trajectory import read as read_calls
from app.models.model_calls import Dialect
from app.models.spec import EnvironmentSpec
from tests.unit.dataset_adapters import load
from tests.unit.test_rows_by_dataset import MOTO, PUBLISHED

few = settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
many = settings(max_examples=3000, deadline=None, database=None, suppress_health_check=list(HealthCheck))

_odd = st.sampled_from(
    ["", "\0", "\ud800", "../..", "/etc/passwd", "a" * 300, "1e999", "\x1b[2J", "${HOME}", "-v", "::"]
)
_text = st.text(max_size=20) | _odd
_number = st.integers(-(2**80), 2**80) | st.floats(allow_nan=True, allow_infinity=True)
_leaf = st.none() | st.booleans() | _number | _text
_value = st.recursive(
    _leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4), max_leaves=12
)
_deep = st.integers(50, 3000).map(lambda depth: "[" * depth)
_raw = st.binary(max_size=200) | _deep.map(str.encode)

HARBOR: dict[str, Any] = {
    "version": "1.0",
    "metadata": {},
    "agent": {"timeout_sec": 60.0},
    "verifier": {"timeout_sec": 60.0, "env": {"A": "b"}, "service": "main"},
    "environment": {"docker_image": "x:1", "cpus": 1, "memory_mb": 512, "memory": "1G", "storage": "1G",
                    "allow_internet": False, "network_mode": "allowlist", "allowed_hosts": ["a.example"], "env": {}},
    "solution": {"env": {}},
    "megaflow": {"setup": ["true"]},
}  # fmt: skip
YAML: dict[str, Any] = {
    "instruction": "Do it.", "parser_name": "pytest", "max_agent_timeout_sec": 60, "max_test_timeout_sec": 60,
    "tags": ["a"], "run_tests_in_same_shell": False, "megaflow": {"setup": ["true"]},
}  # fmt: skip
COMPOSE: dict[str, Any] = {
    "services": {"main": {"image": "x:1", "environment": {"A": "b"},
                          "depends_on": {"db": {"condition": "service_healthy"}}, "volumes": ["data:/data"],
                          "env_file": ["e"], "mem_limit": "1g", "command": "sleep 1"},
                 "db": {"build": {"context": "."}, "healthcheck": {"test": ["CMD", "true"], "interval": "2s"}}},
    "volumes": {"data": {}}, "networks": {"default": {"internal": True}},
}  # fmt: skip
MANIFEST: dict[str, Any] = {
    "name": "a", "version": "1", "placement": "inside", "bundle": ".", "run": ["./a"], "dialect": "chat",
    "env": {"A": "b"},
}  # fmt: skip
RESULT: dict[str, Any] = {"end_reason": "submitted", "detail": "d", "steps": 3, "usage": {"a": 1.0}}
BODIES: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                   {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
                   "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "stream": True},
    Dialect.RESPONSES: {"model": "m", "input": [{"type": "message", "role": "user", "content": "x"},
                        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}], "tools": []},
    Dialect.MESSAGES: {"model": "m", "max_tokens": 9, "system": "s",
                       "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
}  # fmt: skip
REPLIES: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"id": "1", "model": "m", "choices": [{"message": {"content": "x", "tool_calls": []},
                   "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}]}, "token_ids": [1]}],
                   "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    Dialect.RESPONSES: {"id": "1", "model": "m",
                        "output": [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}],
                        "usage": {"input_tokens": 1, "output_tokens": 1}, "status": "completed"},
    Dialect.MESSAGES: {"id": "1", "model": "m", "content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn",
                       "usage": {"input_tokens": 1, "output_tokens": 1}},
}  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """The valid value with some of its places, at any depth, put in another's place, or taken away."""
    found = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        place, key = found, None
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or draw(st.booleans()):
                break
            place = place[key]
        if key is None or not isinstance(place, dict | list) or not place:
            continue
        match draw(st.integers(0, 2)):
            case 0 if isinstance(place, dict):
                del place[key]
            case 1 if isinstance(place, dict):
                place[draw(_text)] = draw(_value)
            case _:
                place[key] = draw(_value)
    return found


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=False).encode("utf-8", "surrogatepass")


def as_toml(value: Any) -> bytes:
    """Inline, so that any nesting can be written; null, which TOML has not, is a text."""

    def written(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ", ".join(f"{json.dumps(str(key))} = {written(item)}" for key, item in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ", ".join(map(written, one)) + "]"
        return repr(one) if isinstance(one, float) else json.dumps("" if one is None else one)

    pairs = value.items() if isinstance(value, dict) else [("a", value)]
    return "".join(f"{json.dumps(str(key))} = {written(one)}\n" for key, one in pairs).encode()


def _dataset(content: bytes, name: str, files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "task"
        for one, text in files.items():
            (folder / one).parent.mkdir(parents=True, exist_ok=True)
            (folder / one).write_text(text)
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        load(str(folder), Reading(pack=lambda one: pack(one)[0]))


def rows(content: bytes) -> None:
    _dataset(content.replace(b"\n", b" "), "rows.jsonl", {})


def row_of(dataset: str) -> Callable[[bytes], None]:
    """By the rules of one dataset, whatever the columns look like; the grading libraries know everything."""

    def read(content: bytes) -> None:
        values = None
        with suppress(ValueError, RecursionError):  # bytes that are no JSON are the target `rows`
            values = json.loads(content)
        if isinstance(values, dict):
            reading = Reading(
                pack=lambda one: pack(one)[0], describe=lambda judge, asked: {"test_command": "x", "image": "x:1"}
            )
            row = Row(values, FaultPlace("row 1"), "rows", Path("/nowhere"))
            ADAPTERS[dataset].task(row, reading).model_dump_json()

    return read


def harbor(content: bytes) -> None:
    files = {
        "instruction.md": "Do it.",
        "environment/Dockerfile": "FROM x\n",
        "tests/test.sh": "",
        "solution/solve.sh": "",
    }
    _dataset(content, "task.toml", files)


def terminal_bench(content: bytes) -> None:
    _dataset(content, "task.yaml", {"Dockerfile": "FROM x\n", "run-tests.sh": "", "solution.sh": ""})


def compose(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "Dockerfile").write_text("FROM x\n")
        (Path(place) / "docker-compose.yaml").write_bytes(content)
        read_project(Path(place))


def an_ended(home: Path, content: bytes) -> Ended:
    for name in ("out", "err", "result.json"):
        (home / name).write_bytes(content)
    return Ended(Stop.ITSELF, 0, home / "out", home / "err", home)


def agent_output(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        ended = an_ended(Path(place), content)
        external_ending(ended)
        result(ended.stdout)
        read_object(ended.home / "result.json")


def external_manifest(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "agent.toml").write_bytes(content)
        manifest.read(Path(place) / "agent.toml")


def reports(content: bytes) -> None:
    for parse in PARSERS.values():
        parse(content.decode("utf-8", "replace"))


def rewards(content: bytes) -> None:
    for read in (script_goal._numbers, script_goal._single):
        with suppress(ValueError, RecursionError):
            script_goal._reward(read(content.decode("utf-8")), (0.0, 1.0))


def image_names(content: bytes) -> None:
    text = content.decode("utf-8", "replace")
    try:
        EnvironmentSpec(image=text)
    except ValidationError:
        return
    Reference.parse(text)


def unpacked_archive(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        archives.unpack(content, Path(place))


def recorded_calls(content: bytes) -> None:
    read_calls(content)


def request_in(dialect: Dialect) -> Callable[[bytes], None]:
    return lambda content: codec_for(dialect).request(json.loads(content)) and None


def reply_in(dialect: Dialect) -> Callable[[bytes], None]:
    def read(content: bytes) -> None:
        codec_for(dialect).usage(content, streamed=False)
        codec_for(dialect).reply(content, streamed=False)

    return read


def stream_in(dialect: Dialect) -> Callable[[bytes], None]:
    def read(content: bytes) -> None:
        for events in (content, b"data: " + content + b"\n\ndata: [DONE]\n\n", b"event: x\ndata: " + content + b"\n\n"):
            codec_for(dialect).reply(events, streamed=True)

    return read


NAMED = (MegaFlowError, ValidationError)
READABLE = (*NAMED, ValueError)
"""Functions whose documentation says ValueError; JSON of a body is read before, with its own refusal."""
TARGETS: dict[str, tuple[Callable[[bytes], None], st.SearchStrategy[bytes], tuple[type[Exception], ...]]] = {
    "rows": (rows, st.sampled_from([row for _, row in PUBLISHED.values()]).flatmap(changed).map(as_json), NAMED),
    **{
        f"row: {name}": (row_of(dataset), changed(row).map(as_json), NAMED)
        for name, (dataset, row) in {**PUBLISHED, "gym": ("swe-gym", MOTO)}.items()
    },
    "harbor task.toml": (harbor, changed(HARBOR).map(as_toml), NAMED),
    "terminal-bench task.yaml": (terminal_bench, changed(YAML).map(as_yaml), NAMED),
    "compose file": (compose, changed(COMPOSE).map(as_yaml), NAMED),
    "yaml": (lambda content: bounded_yaml.parse(content) and None, changed(COMPOSE).map(as_yaml), READABLE),
    "output of an agent": (agent_output, changed(RESULT).map(as_json), NAMED),
    "manifest of an agent": (external_manifest, changed(MANIFEST).map(as_toml), NAMED),
    "test report": (reports, st.text(max_size=400).map(lambda text: text.encode("utf-8", "surrogatepass")), ()),
    "reward": (rewards, changed({"reward": 1.0, "a": 2}).map(as_json), ()),
    "image name": (image_names, _text.map(lambda text: text.encode("utf-8", "surrogatepass")), NAMED),
    "archive": (unpacked_archive, st.binary(max_size=2000), NAMED),
    "recorded calls": (recorded_calls, st.binary(max_size=200), READABLE),
    **{
        f"{kind} in {dialect.value}": (make(dialect), changed(bodies[dialect]).map(as_json), READABLE)
        for dialect in Dialect
        for kind, make, bodies in (
            ("request", request_in, BODIES),
            ("reply", reply_in, REPLIES),
            ("stream", stream_in, REPLIES),
        )
    },
}
by_target = pytest.mark.parametrize("name", TARGETS)


def _fuzz(name: str, how: settings) -> None:
    target, structured, named = TARGETS[name]

    @how
    @given(structured | _raw)
    def any_input(content: bytes) -> None:
        try:
            target(content)
        except (*named, RecursionError) as error:
            if isinstance(error, RecursionError) and "in" not in name.split():  # bodies are read by another parser
                raise

    any_input()


@by_target
def test_any_input_is_read_or_refused_by_name(name: str) -> None:
    _fuzz(name, few)


@pytest.mark.extra
@by_target
def test_many_inputs_are_read_or_refused_by_name(name: str) -> None:
    _fuzz(name, many)


def test_a_deep_document_is_refused(tmp_path: Path) -> None:
    for content in (b"a = " + b"[" * 20_000, b"[" * 20_000):
        with pytest.raises(SpecInvalid):
            harbor(content)
