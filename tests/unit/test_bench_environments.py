"""The environments' benchmark: its arithmetic, and its loop on a contender that needs nothing, a shell of this host."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.settings import Settings
from bench import control_record
from bench.control_record import Part
from bench.environments import (
    agent,
    contenders,
    creations,
    crew,
    files,
    goals,
    plot,
    setups,
    start,
    step,
    thousand,
    warm,
)
from bench.environments.contenders import BARE, CONTENDERS, DOCKER, HARBOR, MINI, OCI, RAW, SWEBENCH, Grounds, Ready
from bench.environments.crew import Crew, Fault, Hand
from bench.environments.figures import against, bars, fastest, missing, round_ratio, spread
from bench.peers import compose, installed
from bench.peers.environments.engine import joined
from bench.record import row


def crew_of(tmp_path: Path, *names: str) -> Any:
    grounds = Grounds(Settings(home=tmp_path / "h"), "no-image", tmp_path)
    return crew.gathered(grounds, names, lambda text: None)


@pytest.fixture
def shells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Crew]:
    """Ours and two others, all played by a shell of this host; a fourth cannot be had."""

    def not_here(grounds: Grounds) -> Ready:
        raise RuntimeError("not on this index")

    for name in (DOCKER, RAW, MINI):
        monkeypatch.setitem(CONTENDERS, name, CONTENDERS[BARE])
    monkeypatch.setitem(CONTENDERS, HARBOR, not_here)
    with crew_of(tmp_path, DOCKER, RAW, MINI, BARE, HARBOR) as gathered:
        yield gathered


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    made = Hand(BARE, CONTENDERS[BARE](Grounds(Settings(home=tmp_path / "h"), "no-image", tmp_path)), tmp_path)
    yield made
    made.leave()


# --- Figures --------------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_its_round() -> None:
    quiet_then_busy, twice = [[0.1], [1.0], [0.1]], [[0.2], [2.0], [0.2]]
    assert round_ratio(twice, quiet_then_busy) == pytest.approx(2.0)
    assert round_ratio([], quiet_then_busy) is None


def test_ours_is_held_against_the_fastest_of_the_peers() -> None:
    found = {"ours": [[0.001]], "slow": [[0.1]], "fast": [[0.05]], "absent": [[]]}
    assert fastest(found, ("slow", "fast", "absent", "unknown")) == "fast"
    (ratio,) = against("step", found, "ours", ("slow", "fast"), goal=30)
    assert (ratio.metric, ratio.value, ratio.holds) == ("step: ours, against fast", 50.0, True)
    assert against("step", found, "nobody", ("slow",)) == []


def test_a_spread_is_of_all_rounds_and_its_goal_of_the_median() -> None:
    rows = {item.metric: item for item in spread("x", [[0.001] * 50, [0.002] * 49, [9.0]], goal_ms=1.5)}
    assert (rows["x: p50"].value, rows["x: p50"].holds) == (1.0, True)
    assert (rows["x: p99"].value, rows["x: p99"].goal, rows["x: n"].value) == (2.0, None, 100)
    assert bars({"x": [[0.001], [0.003]], "y": []}) == {"x": [1.0, 3.0]}
    assert spread("x", []) == []


def test_who_is_missing_is_listed_with_the_reason_once() -> None:
    rows = missing("start", {"Harbor": "no Python 3.12"}, {"Inspect": "engine too old"})
    kept = {part: {"rows": [vars_of(item) for item in rows]} for part in ("start", "step")}
    assert goals.unmeasured(kept) == [("start: Harbor", "no Python 3.12"), ("start: Inspect", "engine too old")]


def test_goals_are_read_from_what_is_kept_and_counted(tmp_path: Path) -> None:
    rows = [row("a", 1.0, "ms", goal=2.0, better="less"), row("b", 1.0, "x", goal=30.0), row("c", 1.0, "s")]
    control_record.keep(tmp_path / "f.json", "step", Part(rows, {}), busy=0, took_s=0)
    kept = control_record.load(tmp_path / "f.json")
    assert [(v.part, v.metric, v.holds) for v in goals.verdicts(kept)] == [("step", "a", True), ("step", "b", False)]
    assert goals.summary(kept) == "1 of 2 goals met"


def test_overhead_is_beyond_the_local_shell_of_the_same_round() -> None:
    ours = [{"whole_s": 2.0}, {"whole_s": 12.0}, {"whole_s": 2.2}]
    bare = [{"steps_s": 1.0}, {"steps_s": 11.0}, {"steps_s": 1.1}]
    assert agent.overhead_s(ours, bare) == pytest.approx(1.0)


def test_the_agents_script_has_as_many_steps_as_asked_for() -> None:
    assert len(agent.script(100)) == 100
    assert agent.script(10) == agent.script(100)[:10]


def test_an_attached_stream_is_joined_without_its_headers_and_without_a_torn_one() -> None:
    frames = b"\x01\0\0\0\0\0\0\x03out" + b"\x02\0\0\0\0\0\0\x02er" + b"\x01\0\0"
    assert joined(frames) == b"outer"


# --- The loop in its own process ------------------------------------------------------------------------------------


def test_a_contender_measures_itself_and_leaves(hand: Hand) -> None:
    assert hand.ask("hello", timeout_s=20)["python"]
    assert len(hand.ask("open", timeout_s=20, count=3, width=2)["took_s"]) == 3
    assert len(hand.ask("steps", timeout_s=20, count=5)["took_s"]) == 5
    flood = hand.ask("flood", timeout_s=20, seconds=0.2)
    assert flood["steps"] > 3
    assert 0 < flood["p50_s"] <= flood["p99_s"] < 5
    assert len(hand.ask("close", timeout_s=20, gently=True)["took_s"]) == 3


def test_commands_that_fail_are_counted(hand: Hand) -> None:
    told = hand.ask("task", timeout_s=20, commands=["true", "exit 3", "cd /not/there"])
    assert told["failed"] == 2
    assert told["whole_s"] >= told["start_s"] + told["steps_s"]


def test_a_crowd_says_who_failed_and_why(hand: Hand) -> None:
    assert hand.ask("crowd", timeout_s=20, count=3, width=2, commands=["true"])["failed"] == 0
    told = hand.ask("crowd", timeout_s=20, count=2, width=2, commands=["true", "exit 9"])
    assert (told["failed"], told["took_s"]) == (2, [])
    assert "exit 9" in told["reason"]


def test_what_a_contender_cannot_do_is_a_fault_and_it_lives_on(hand: Hand) -> None:
    with pytest.raises(Fault, match="pooled"):
        hand.ask("pooled", timeout_s=20, count=1)
    assert hand.ask("hello", timeout_s=20)


def test_a_contender_that_says_nothing_in_time_is_ended(hand: Hand) -> None:
    hand.ask("open", timeout_s=20, count=1, width=1)
    begun = time.monotonic()
    with pytest.raises(Fault, match="no answer"):
        hand.ask("flood", timeout_s=0.3, seconds=30)
    assert time.monotonic() - begun < 10
    with pytest.raises(Fault, match="ended"):
        hand.ask("hello", timeout_s=20)


def test_a_contender_that_cannot_start_says_why(tmp_path: Path) -> None:
    made = Hand("x", Ready(sys.executable, "peer_that_is_not", {}), tmp_path)
    with pytest.raises(Fault, match="peer_that_is_not"):
        made.ask("hello", timeout_s=20)
    made.leave()


def test_our_settings_do_not_reach_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAFLOW_HOME", "/somewhere")
    given = crew._variables(Ready("/peers/python", "x", {}, {"DOCKER_CONFIG": "c"}), tmp_path)
    assert "MEGAFLOW_HOME" not in given
    assert (given["HOME"], given["DOCKER_CONFIG"]) == (str(tmp_path), "c")


@pytest.mark.extra
def test_turns_begin_with_another_each_round_and_leave_out_who_fell(shells: Crew) -> None:
    assert [name for _, name in shells.turns(2, [DOCKER, MINI, HARBOR])] == [DOCKER, MINI, MINI, DOCKER]
    assert shells.ask(MINI, "no such measurement") is None
    assert [name for _, name in shells.turns(1, [DOCKER, MINI])] == [DOCKER]
    assert "no such measurement" in shells.faults[MINI]
    assert shells.absent == {HARBOR: "not on this index"}


@pytest.mark.extra
@pytest.mark.parametrize(
    ("module", "scale"),
    [
        (start, start.Scale(rounds=2, each=1, ours=2, slow_ends=1)),
        (step, step.Scale(rounds=1, each=2, ours=3, flood_s=0.1, flood_rounds=1, many=3)),
        (creations, creations.Scale(rounds=1, each=2, ours=3)),
        (files, files.Scale(rounds=1, counts=((1, 1),))),
        (agent, agent.Scale(rounds=1, steps=3)),
    ],
    ids=["start", "step", "creations", "files", "agent"],
)
def test_a_part_is_measured_kept_and_drawn(module: Any, scale: Any, shells: Crew, tmp_path: Path) -> None:
    part = module.measure(scale, shells)
    control_record.keep(tmp_path / "f.json", "part", part, busy=0, took_s=0)
    kept = control_record.load(tmp_path / "f.json")["part"]
    assert json.dumps(kept)
    metrics = [item["metric"] for item in kept["rows"]]
    assert any(DOCKER in metric and not metric.endswith("not measured") for metric in metrics) or module is files
    assert any(HARBOR in metric and metric.endswith("not measured") for metric in metrics)
    plot.draw(kept["samples"], tmp_path / "f.png")
    assert (tmp_path / "f.png").exists() or module is files, "a shell has no files to draw"


class Canned:
    """A crew whose answers are known."""

    absent: dict[str, str] = {}
    faults: dict[str, str] = {}
    versions: dict[str, str] = {}

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    def turns(self, rounds: int, names: Any) -> Iterator[tuple[int, str]]:
        yield from ((number, name) for number in range(rounds) for name in names)

    def ask(self, name: str, what: str, **arguments: Any) -> Any:
        return self._answers.get(f"{name}: {what}", self._answers.get(what))


def holds(part: Part) -> dict[str, bool | None]:
    return {item.metric: item.holds for item in part.rows if item.goal is not None}


def test_a_thousand_with_one_failure_or_one_left_misses_its_goal() -> None:
    crowd = {"took_s": [0.1], "wall_s": 1.0, "failed": 0, "reason": "", "cpu_s": 0.001}
    opened = {"took_s": [0.1] * 4, "reason": ""}
    answers = {"crowd": crowd, "left": {"left": 0}, "swept": {"left": 0}, "open": opened, "flood": {}, "close": {}}
    scale = thousand.Scale(count=10, alive=4)
    assert all(holds(thousand.measure(scale, Canned(answers))).values())  # type: ignore[arg-type]
    answers |= {f"{DOCKER}: crowd": crowd | {"failed": 1, "reason": "why"}, f"{OCI}: swept": {"left": 1}, "flood": None}
    found = holds(thousand.measure(scale, Canned(answers)))  # type: ignore[arg-type]
    missed = {metric for metric, held in found.items() if not held}
    assert {f"thousand: {DOCKER}: success", f"thousand: {OCI}: left"} < missed
    assert f"4 alive: {OCI}: alive at once, all answering" in missed


def test_the_warm_part_holds_our_teardown_against_the_engines_own() -> None:
    ours = {"handout_s": [0.004], "recycle_s": [0.02], "teardown_s": [0.03]}
    part = warm.measure(warm.Scale(rounds=2), Canned({"pooled": ours, "removals": {"took_s": [0.02]}}))  # type: ignore[arg-type]
    assert all(holds(part).values())
    part = warm.measure(warm.Scale(rounds=2), Canned({"pooled": ours, "removals": {"took_s": [0.01]}}))  # type: ignore[arg-type]
    assert holds(part)[f"warm: teardown: {DOCKER} to raw kill + remove"] is False


def test_a_reset_has_a_goal_for_each_runtime() -> None:
    ours = {"handout_s": [0.004], "recycle_s": [0.09], "teardown_s": [0.03]}
    answers = {"pooled": ours, "removals": {"took_s": [0.03]}, "replacements": {"took_s": [0.3]}}
    found = holds(warm.measure(warm.Scale(rounds=1), Canned(answers)))  # type: ignore[arg-type]
    assert [found[f"warm: recycle: {name}: p50"] for name in (DOCKER, OCI)] == [True, False]


@pytest.mark.extra
def test_sessions_and_single_commands_have_goals(shells: Crew) -> None:
    scale = step.Scale(rounds=1, each=2, ours=3, flood_s=0.1, flood_rounds=1, many=3)
    rows = {item.metric: item for item in step.measure(scale, shells).rows}
    for label in (step.STEP, step.SESSION):
        held = [
            f"{label}: {DOCKER}: p50",
            f"{label}, 8 environments: {DOCKER}",
            f"{label}, 3 environments: {DOCKER}: p99",
        ]
        assert all(rows[metric].goal is not None for metric in held)
    assert isinstance(host := rows["step: new shells of the host, all processors"].value, float)
    assert host > 0
    assert rows[f"step, 8 environments: {DOCKER} to new shells of the host"].goal is None


def test_a_set_up_that_runs_once_more_than_there_are_tasks_misses_its_goal() -> None:
    told = {"asked": 32, "ran": 2, "wall_s": 1.0, "took_s": [0.1]}
    answers = {"setups": told, f"{OCI}: setups": told | {"ran": 3}}
    found = holds(setups.measure(setups.Scale(tasks=2, replicas=16), Canned(answers)))  # type: ignore[arg-type]
    assert list(found.values()) == [True, False]


# --- Peers ----------------------------------------------------------------------------------------------------------


def test_every_contender_has_its_adapter_beside_the_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without installing anything: only what they would be started with."""
    monkeypatch.setattr(contenders, "python_with", lambda wanted: Path("/peers") / wanted.name)
    monkeypatch.setattr(contenders, "_rex_image", lambda grounds: None)
    monkeypatch.setattr(contenders.compose, "config_folder", lambda: None)
    monkeypatch.setattr(contenders, "engine_of", lambda settings: SimpleNamespace(cpus=2))
    grounds = Grounds(Settings(home=tmp_path), "image", tmp_path)
    found = {name: made(grounds).adapter for name, made in CONTENDERS.items()}
    assert all((crew.LOOP.parent / f"{adapter}.py").exists() for adapter in found.values())
    assert found[SWEBENCH] == "peer_swebench"


@pytest.mark.parametrize(
    "text",
    [
        "Types: deb\n# a remark\nURIs: http://mirror.test/debian\nSuites: bookworm\n",
        "deb [signed-by=/k.gpg] http://mirror.test/debian bookworm main\n",
        "deb http://mirror.test/debian-security bookworm main\ndeb http://mirror.test/debian bookworm main\n",
    ],
)
def test_the_mirror_that_apt_has_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(text)
    monkeypatch.setattr(compose, "_SOURCES", tmp_path)
    assert compose._mirror() == "http://mirror.test/debian"


def test_a_machine_without_such_a_mirror_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compose, "_SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match="mirror"):
        compose._mirror()


def test_an_installer_that_fails_says_so_and_leaves_nothing_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(installed, "_uv", lambda: str(program))
    with pytest.raises(RuntimeError, match="no such package"):
        installed.python_with(installed.Wanted("x", ("x==1",)))
    assert not list(tmp_path.rglob("complete"))


def vars_of(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in ("metric", "value", "unit", "goal", "holds")}
