"""Datasets by name: what is asked of a hub, what is kept, and what is said when it has not got it.

The hub is a loopback server that answers as the real one's API does. Each fetch runs in a fork, because
huggingface_hub reads its variables when it is imported.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.datasets.catalogue import CATALOGUE
from app.datasets.hub import files_of
from tests.forked import megaflow
from tests.unit.dataset_adapters import parquet
from tests.unit.hub_server import HubServer, hub_server
from tests.unit.row_reading import CLASSIC

LITE = "SWE-bench/SWE-bench_Lite"
SHARD = "data/test-00000-of-00001.parquet"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return parquet(tmp_path / "made.parquet", [swe_bench_row(number) for number in range(3)]).read_bytes()


def swe_bench_row(number: int) -> dict[str, Any]:
    return {**CLASSIC, "instance_id": f"psf__requests-{number}", "repo": "psf/requests", "version": "2.0"}


class Command:
    """`megaflow dataset …` against a hub and a cache of this test alone."""

    def __init__(self, home: Path, hub: HubServer) -> None:
        self._home, self._hub = home, hub

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        home = {"HF_HOME": str(self._home / "hf"), "MEGAFLOW_HOME": str(self._home / "megaflow")}
        settings = {"HF_ENDPOINT": self._hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return megaflow("dataset", *arguments, **(home | settings | variables))

    def json(self, *arguments: str, **variables: str) -> dict[str, Any]:
        done = self(*arguments, "--json", **variables)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def command(tmp_path: Path, hub: HubServer) -> Command:
    return Command(tmp_path, hub)


def test_a_dataset_comes_from_the_hub_once_and_then_from_its_cache(
    command: Command, hub: HubServer, content: bytes
) -> None:
    commit = hub.publish(LITE, {SHARD: content, "README.md": b"x", "data/dev-00000-of-00001.parquet": b"no parquet"})
    about = command.json("pull", "swe-bench-lite")
    assert about["revision"] == commit
    assert (about["name"], about["hub_id"], about["tasks"]) == ("swe-bench-lite", LITE, 3)
    assert f"GET /api/datasets/{LITE}/revision/main" in hub.requests
    assert any(one.startswith(f"HEAD /datasets/{LITE}/resolve/{commit}/{SHARD}") for one in hub.requests)
    assert not any("dev-" in one or "README" in one for one in hub.requests)
    fetched = [one for one in hub.requests if "/resolve/" in one]
    assert command.json("pull", "swe-bench-lite") == about
    assert [one for one in hub.requests if "/resolve/" in one] == fetched
    hub.requests.clear()
    assert command.json("pull", "swe-bench-lite", HF_HUB_OFFLINE="1") == about
    assert hub.requests == []


def test_a_revision_is_resolved_to_its_commit(command: Command, hub: HubServer, content: bytes, tmp_path: Path) -> None:
    old = hub.publish(LITE, {SHARD: content}, "v1")
    more = parquet(tmp_path / "more.parquet", [swe_bench_row(number) for number in range(5)]).read_bytes()
    new = hub.publish(LITE, {SHARD: more})
    tagged, newest, by_commit = (command.json("show", f"swe-bench-lite{at}") for at in ("@v1", "", f"@{old}"))
    assert (tagged["revision"], tagged["tasks"]) == (old, 3)
    assert (newest["revision"], newest["tasks"]) == (new, 5)
    assert by_commit["content_hash"] == tagged["content_hash"] != newest["content_hash"]
    assert newest["repositories"] == {"psf/requests": 5}
    assert newest["languages"] == {"python": 5}


def test_files_of_several_languages_are_one_dataset(tmp_path: Path) -> None:
    for name in ("go/o__a_dataset.jsonl", "rust/o__b_dataset.jsonl", "python/o__c_dataset.jsonl", "go/old/o__d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in files_of(tmp_path, CATALOGUE["multi-swe-bench"])]
    assert found == ["go/o__a_dataset.jsonl", "rust/o__b_dataset.jsonl"]


@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [
        ("swe-bench-lite@v9", 64, "expected a branch, a tag or a commit of SWE-bench/SWE-bench_Lite; found 'v9'"),
        ("swe-bench", 64, "expected SWE-bench/SWE-bench on the hub; found none; give a local copy as swe-bench=PATH"),
        ("swe-bench-verified", 69, "access to SWE-bench/SWE-bench_Verified without a login"),
        ("swe-rebench", 69, r"expected files data/filtered-*.parquet"),
    ],
)
def test_what_the_hub_has_not_got_is_named(
    command: Command, hub: HubServer, content: bytes, argument: str, code: int, said: str
) -> None:
    hub.publish(LITE, {SHARD: content})
    hub.publish("SWE-bench/SWE-bench_Verified", {SHARD: content})
    hub.gated.add("SWE-bench/SWE-bench_Verified")
    hub.publish("nebius/SWE-rebench", {SHARD: content})
    done = command("pull", argument)
    assert done.returncode == code, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_offline_and_never_fetched_is_said_so(command: Command, hub: HubServer, content: bytes) -> None:
    hub.publish(LITE, {SHARD: content})
    done = command("pull", "swe-bench-lite", HF_HUB_OFFLINE="1")
    assert done.returncode == 69
    assert "from the hub or in its cache" in done.stderr
    assert "give a local copy as swe-bench-lite=PATH" in " ".join(done.stderr.split())
    assert hub.requests == []


def test_a_hub_that_is_not_there_leaves_what_is_in_the_cache(command: Command, hub: HubServer, content: bytes) -> None:
    commit = hub.publish(LITE, {SHARD: content})
    command.json("pull", "swe-bench-lite")
    assert command.json("pull", "swe-bench-lite", HF_ENDPOINT="http://127.0.0.1:9")["revision"] == commit
    done = command("pull", "swe-bench", HF_ENDPOINT="http://127.0.0.1:9")
    assert (done.returncode, "Got:" in done.stderr, "Traceback" in done.stderr) == (69, False, False), done.stderr


def test_a_shard_that_is_missing_in_the_cache_is_not_passed_over(
    command: Command, hub: HubServer, content: bytes, tmp_path: Path
) -> None:
    shards = {f"data/test-0000{number}-of-00002.parquet": content for number in range(2)}
    hub.publish(LITE, shards)
    command("pull", "swe-bench-lite")
    (lost,) = tmp_path.rglob("test-00001-of-00002.parquet")
    lost.unlink()
    done = command("pull", "swe-bench-lite", HF_HUB_OFFLINE="1")
    assert done.returncode == 69
    assert "incomplete" in done.stderr
