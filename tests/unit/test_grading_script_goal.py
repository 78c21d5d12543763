"""Grading by a script that writes a reward, in a temporary folder with real commands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from app.artifacts.bundles import pack
from app.errors import EnvironmentFailed, GradingFailed, TestRunnerMissing
from app.grading import grader_for
from app.grading.base import Grade, GradingInput
from app.models.outcome import Verdict
from app.models.shell import CommandResult
from app.models.spec import AgentTask, Bundle, EnvironmentSpec, Limits, ScriptGoal, ServiceScript
from tests.unit.folder_shell import FolderShell

GOAL = ScriptGoal(
    tests=Bundle(sha256="0" * 64, size_bytes=1), command='bash "${TESTS_DIR:-/tests}/test.sh"', logs_path="/logs"
)
REWARD = '"$LOGS_DIR/verifier/reward'


@pytest.fixture
def shell(tmp_path: Path) -> FolderShell:
    return FolderShell(tmp_path / "environment", "/app")


def grade(shell: FolderShell, script: str, *, timeout_s: float = 30.0, goal: ScriptGoal = GOAL, **files: str) -> Grade:
    folder = shell.root.parent / "tests"
    folder.mkdir(exist_ok=True)
    for name, text in {"test.sh": script, **files}.items():
        (folder / name).write_text(text)
    task = AgentTask(
        name="t",
        description="d",
        environment=EnvironmentSpec(image="i", workdir="/app"),
        goal=goal,
        limits=Limits(grading_timeout_s=timeout_s),
    )
    return grader_for(goal).grade(GradingInput(task, None, pack(folder)[1]), shell)


def test_a_number_in_reward_txt_is_the_reward_whatever_the_exit_code(shell: FolderShell) -> None:
    shell.put("/app/answer", b"looked\n")  # the script starts in the task's working folder
    got = grade(shell, f'cat answer; echo 0.75 > {REWARD}.txt"; exit 3\n')
    assert (got.verdict.reward, got.verdict.counts, got.report) == (0.75, True, b"looked\n")
    assert not shell.path("/logs/services").exists(), "a single container has none"


def test_reward_json_wins_over_reward_txt_and_its_other_numbers_are_metrics(shell: FolderShell) -> None:
    got = grade(shell, f'echo 1 > {REWARD}.txt"; echo \'{{"reward": 1, "speed": 2.5}}\' > {REWARD}.json"\n')
    assert got.verdict.reward == 1.0
    assert got.verdict.metrics == {"reward": 1.0, "speed": 2.5}
    assert grade(shell, f'echo \'{{"score": 0.5}}\' > {REWARD}.json"\n').verdict.reward == 0.5, "a single one"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("json", '{"a": 1, "b": 2}', "named `reward`, or just one; found a, b"),
        ("json", '{"reward": NaN}', "not finite"),
        ("json", '{"reward": 1e999}', "not finite"),
        ("json", '{"reward": 1e300}', "not between -1e+06 and 1e+06"),
        ("txt", "-1e7", "not between"),
        ("json", '{"reward": "1"}', "no number"),
        ("json", '{"reward": true}', "no number"),
        ("json", '{"reward": {"value": 1}}', "no number"),
        ("json", "", "no JSON object"),
        ("json", "[1]", "no JSON object"),
        ("json", "[" * 100_000, "finite numbers in reward.json"),
        ("txt", "", "finite numbers in reward.txt"),
        ("txt", "nan", "not finite"),
        ("txt", "passed", "finite numbers in reward.txt"),
        ("txt", "1_0", "no number"),
        ("txt", "\uff11", "no number"),
        ("json", '{"reward": 1, "a\\u0000b": 1}', "the name 'a\\x00b', which is not"),
        ("json", '{"reward": 1, "\\ud800": 1}', "the name '\\ud800', which is not"),
        ("json", json.dumps({f"part{n}": 1 for n in range(1001)}), "1,001 of them, more than 1,000"),
    ],
)
def test_a_reward_that_is_no_number_means_that_nothing_was_measured(
    shell: FolderShell, name: str, content: str, complaint: str
) -> None:
    with pytest.raises(GradingFailed, match="its output ends with:\nwhat it printed") as caught:
        grade(shell, f'echo what it printed; cat "$TESTS_DIR/content" > {REWARD}.{name}"\n', content=content)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(("said", "is_one"), [("-1", True), ("60", True), ("60.5", False), ("-2", False)])
def test_a_reward_outside_of_the_tasks_range_is_none(shell: FolderShell, said: str, is_one: bool) -> None:
    goal, script = GOAL.model_copy(update={"reward_range": (-1.0, 60.0)}), f'echo {said} > {REWARD}.txt"\n'
    if is_one:
        assert grade(shell, script, goal=goal).verdict.reward == float(said)
        return
    with pytest.raises(GradingFailed, match=f"in the task's reward_range, -1 to 60; found {said}"):
        grade(shell, script, goal=goal)


def test_no_reward_means_that_nothing_was_measured_and_the_logs_tail_says_why(shell: FolderShell) -> None:
    with pytest.raises(TestRunnerMissing, match=r"(?s)found neither.*exit code was 127.*no-such-program"):
        grade(shell, "no-such-program\n")


def test_an_old_reward_of_the_agents_does_not_count(shell: FolderShell) -> None:
    shell.put("/logs/verifier/reward.json", b'{"reward": 1}')
    shell.put("/logs/verifier/reward.txt", b"1")
    with pytest.raises(GradingFailed, match="found neither"):
        grade(shell, "true\n")


def test_what_the_agent_put_where_the_tests_go_is_away(shell: FolderShell) -> None:
    shell.put("/tests/conftest.py", b"cheat")
    shell.put("/tests/.hidden", b"cheat")
    got = grade(shell, f'ls -A "$TESTS_DIR"; echo 1 > {REWARD}.txt"\n')
    assert got.report == b"test.sh\n"


def test_a_link_of_the_agents_where_the_tests_go_leads_nowhere(shell: FolderShell) -> None:
    shell.put("/elsewhere/file", b"the agent's")
    shell.path("/tests").symlink_to(shell.path("/elsewhere"))
    grade(shell, f'echo 1 > {REWARD}.txt"\n')
    assert shell.get("/elsewhere/file") == b"the agent's"
    assert not shell.path("/tests").is_symlink()


class Several(FolderShell):
    """Two containers: where the agent acted, and a shop."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "main", "/app")
        self.shop = FolderShell(root / "shop", "/app")
        self.services = ("main", "shop")

    def service(self, name: str) -> FolderShell:
        return {"main": self, "shop": self.shop}[name]

    def assure(self) -> None:
        """Both stand."""

    def logs(self) -> dict[str, bytes]:
        return {"shop": b"PUT /items/apples\n"}


def test_the_tests_run_in_the_service_that_the_goal_names(tmp_path: Path) -> None:
    several = Several(tmp_path / "environment")
    several.put("/app/stock", b"the agent's")
    several.shop.put("/app/stock", b"the shop's")
    got = grade(several, f'cat stock; echo 1 > {REWARD}.txt"\n', goal=GOAL.model_copy(update={"service": "shop"}))
    assert (got.verdict.reward, got.report) == (1.0, b"the shop's")
    assert not several.path("/tests").exists()


BOTH = GOAL.model_copy(
    update={
        "command": 'bash "$TESTS_DIR/test.sh"',
        "service": "main",
        "also": (ServiceScript(service="shop", command='bash "$TESTS_DIR/shop.sh"'),),
    }
)


@pytest.mark.parametrize(("main", "shop"), [(1, 1), (1, 0), (0, 1)])
def test_two_services_judge_and_the_lowest_reward_counts(tmp_path: Path, main: int, shop: int) -> None:
    several = Several(tmp_path / "environment")
    scripts = {"shop.sh": f'echo in the shop; echo {shop} > {REWARD}.txt"\n'}
    got = grade(several, f'echo in main; echo {main} > {REWARD}.txt"\n', goal=BOTH, **scripts)
    assert got.verdict.reward == min(main, shop)
    assert got.verdict.metrics == {"main.reward": main, "shop.reward": shop, "reward": min(main, shop)}
    assert got.verdict.detail.endswith(f"gave: main {main}, shop {shop}")
    assert got.report == b"--- main ---\nin main\n\n--- shop ---\nin the shop\n"


def test_one_of_two_that_says_nothing_means_that_nothing_was_measured_and_is_named(tmp_path: Path) -> None:
    good = f'echo 1 > {REWARD}.txt"\n'
    with pytest.raises(GradingFailed, match="found neither in the service 'shop'; its exit code was 3"):
        grade(Several(tmp_path / "silent"), good, goal=BOTH, **{"shop.sh": "exit 3\n"})
    with pytest.raises(GradingFailed, match=r"to end within [012] s; found it running in the service 'shop'"):
        grade(Several(tmp_path / "late"), f"sleep 0.6; {good}", goal=BOTH, timeout_s=3, **{"shop.sh": "sleep 60\n"})


def test_a_reward_of_the_first_is_not_taken_for_the_seconds_where_they_share_a_folder(tmp_path: Path) -> None:
    several = Several(tmp_path / "environment")
    several.path("/logs").mkdir()
    several.shop.path("/logs").symlink_to(several.path("/logs"))
    with pytest.raises(GradingFailed, match="found neither in the service 'shop'"):
        grade(several, f'echo 1 > {REWARD}.txt"\n', goal=BOTH, **{"shop.sh": "true\n"})


def test_every_services_log_lies_beside_the_tests_whatever_the_agent_put_there(tmp_path: Path) -> None:
    several = Several(tmp_path / "environment")
    several.put("/app/mine", b"untouched")
    several.path("/logs").mkdir()
    several.path("/logs/services").symlink_to(several.path("/app"))
    script = f'ls "$LOGS_DIR/services"; cat "$LOGS_DIR/services/shop.log"; echo 1 > {REWARD}.txt"\n'
    assert grade(several, script).report == b"main.log\nshop.log\nPUT /items/apples\n"
    assert several.path("/logs/services/shop.log").stat().st_mode & 0o777 == 0o444
    assert grade(several, script).report == b"main.log\nshop.log\nPUT /items/apples\n"
    assert [one.name for one in several.path("/app").iterdir()] == ["mine"]


def test_a_service_that_is_not_there_means_that_nothing_was_measured(tmp_path: Path, shell: FolderShell) -> None:
    several, goal = Several(tmp_path / "several"), GOAL.model_copy(update={"service": "db"})
    second = BOTH.model_copy(update={"also": (ServiceScript(service="db", command="true"),)})
    for wrong in (goal, second):
        with pytest.raises(GradingFailed, match="the service 'db', in which the tests are to run; found main, shop"):
            grade(several, f'echo 1 > {REWARD}.txt"\n', goal=wrong)
        assert not several.path("/tests").exists(), "it is told before anything is touched"
    with pytest.raises(GradingFailed, match=r"'db'.*; found an environment of one container"):
        grade(shell, f'echo 1 > {REWARD}.txt"\n', goal=goal)


def test_a_script_that_never_ends_means_that_nothing_was_measured(shell: FolderShell) -> None:
    with pytest.raises(GradingFailed, match=r"(?s)to end within 1 s.*begun"):
        grade(shell, "echo begun; sleep 60\n", timeout_s=1.0)


class Starved(FolderShell):
    """Whose kernel kills for memory while the tests run."""

    def run(self, command: str, **how: Any) -> CommandResult:
        result = super().run(command, **how)
        return dataclasses.replace(result, out_of_memory="test.sh" in command)


@pytest.fixture
def starved(tmp_path: Path) -> FolderShell:
    return Starved(tmp_path / "environment", "/app")


@pytest.mark.parametrize(
    ("script", "timeout_s", "said"),
    [
        ("echo looking; kill -9 $$\n", 30.0, "exit code was 137"),
        ("echo looking; sleep 30\n", 0.5, "found it running"),
        (f'echo looking; : > {REWARD}.txt"\n', 30.0, "finite numbers in reward.txt"),
    ],
)
def test_tests_out_of_memory_that_leave_no_reward_are_a_result(
    starved: FolderShell, script: str, timeout_s: float, said: str
) -> None:
    got = grade(starved, script, timeout_s=timeout_s)
    assert (got.verdict.reward, got.verdict.counts) == (0.0, True)
    assert got.report.startswith(b"looking\n")
    limit_bytes = EnvironmentSpec(image="i", workdir="/app").resources.memory_bytes
    for part in (said, f"killed at the environment's memory limit of {limit_bytes} bytes", "looking"):
        assert part in got.verdict.detail


def test_a_reward_counts_although_memory_was_short_and_that_is_said(starved: FolderShell) -> None:
    verdict = grade(starved, f'echo 0.5 > {REWARD}.txt"\n').verdict
    assert (verdict.reward, "the tests script gave 0.5; while" in verdict.detail) == (0.5, True)


@pytest.mark.parametrize(
    ("reward", "counts", "resolved"), [(1.0, True, True), (0.99, True, False), (None, False, False), (2.0, True, True)]
)
def test_a_full_reward_that_counts_is_resolved(reward: float | None, counts: bool, resolved: bool) -> None:
    assert Verdict(reward=reward, counts=counts).resolved is resolved


def test_rewards_that_contradict_each_other_are_suspect(shell: FolderShell) -> None:
    """A program under test writes reward.json, which wins, while the script writes what it found to reward.txt."""
    got = grade(shell, f'echo \'{{"reward": 1}}\' > {REWARD}.json"; echo 0 > {REWARD}.txt"\n')
    assert (got.verdict.reward, got.verdict.claimed_reward) == (0.0, 1.0)
    assert "contradict" in got.verdict.suspect


@pytest.mark.parametrize("beside", ["ln -s /dev/null", "mkfifo", "mkdir", "touch", "ln -s /nowhere", "echo passed >"])
def test_a_reward_txt_that_takes_no_number_beside_a_reward_json_is_suspect(shell: FolderShell, beside: str) -> None:
    got = grade(shell, f'{beside} {REWARD}.txt"; echo \'{{"reward": 1}}\' > {REWARD}.json"\n')
    assert (got.verdict.reward, got.verdict.claimed_reward) == (0.0, 1.0)
    assert "reward.txt beside reward.json is no file with a number" in got.verdict.suspect


class Unreadable(FolderShell):
    """No file can be read, as where one is beyond the limit."""

    def get(self, path: str) -> bytes:
        if not self.path(path).exists():
            raise FileNotFoundError(path)
        raise EnvironmentFailed(f"expected at most 256 MiB in {path}; found more")


@pytest.mark.parametrize(
    ("made", "complaint"), [("truncate -s 300M", "314,572,800 bytes"), ("ln -s /dev/zero", "cannot be read")]
)
@pytest.mark.parametrize("name", ["json", "txt"])
def test_a_reward_file_that_is_too_large_is_the_gradings_failure_and_not_the_environments(
    tmp_path: Path, made: str, complaint: str, name: str
) -> None:
    with pytest.raises(GradingFailed, match=f"expected finite numbers in reward.{name}; found .*{complaint}"):
        grade(Unreadable(tmp_path / "environment", "/app"), f'{made} {REWARD}.{name}"\n')


def test_a_reward_txt_that_is_too_large_beside_a_reward_json_is_suspect(shell: FolderShell) -> None:
    got = grade(shell, f'truncate -s 300M {REWARD}.txt"; echo \'{{"reward": 1}}\' > {REWARD}.json"\n')
    assert "no file with a number" in got.verdict.suspect
