"""Task folders in the Harbor and Terminal-Bench formats, mixed folders, and what is not a dataset."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from app.artifacts.bundles import pack
from app.datasets.base import Reading
from app.errors import DatasetInvalid
from app.grading import grader_for
from app.grading.base import GradingInput
from app.models.spec import AgentTask, Bundle, EnvironmentKind, Network, Reuse, ScriptGoal, ScriptSolution
from tests.unit import task_folders
from tests.unit.dataset_adapters import load
from tests.unit.folder_shell import FolderShell
from tests.unit.task_folders import NOTHING, files

TOML = """version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 60.5
env = { LEVEL = "it's 3" }
[environment]
build_timeout_sec = 300
cpus = 1.5
memory_mb = 512
allow_internet = false
env = { GREETING = "hello" }
"""
STORED: dict[str, bytes] = {}


def reading(kind: EnvironmentKind = EnvironmentKind.DOCKER) -> Reading:
    def keep(folder: Path) -> Bundle:
        bundle, STORED[bundle.sha256] = pack(folder)
        return bundle

    return Reading(pack=keep, kind=kind)


def names_in(bundle: Bundle) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(STORED[bundle.sha256])) as tar:
        return tar.getnames()


def harbor(folder: Path, toml: str = TOML, more: Mapping[str, str] = NOTHING) -> Path:
    stages = "FROM scratch AS one\nWORKDIR /one\nFROM scratch\nWORKDIR /srv\nworkdir sub\n"
    return task_folders.harbor(folder, toml, {"environment/Dockerfile": stages, **more})


def test_a_harbor_folder_becomes_a_task(tmp_path: Path) -> None:
    [task] = load(str(harbor(tmp_path / "hello")), reading(EnvironmentKind.LOCAL))
    environment, limits = task.environment, task.limits
    assert (task.name, task.dataset, task.description) == ("hello", "hello", "Do it.")
    assert environment.kind is EnvironmentKind.LOCAL
    assert environment.build
    assert names_in(environment.build.context) == ["Dockerfile"]
    assert environment.build.timeout_s == 300.0
    assert environment.workdir == "/srv/sub"
    assert (environment.resources.cpus, environment.resources.memory_bytes) == (1.5, 512 << 20)
    assert (environment.network, environment.env) == (Network.NONE, {"GREETING": "hello"})
    assert (limits.agent_timeout_s, limits.grading_timeout_s, limits.environment_timeout_s) == (120.0, 60.5, 600.0)
    assert isinstance(task.goal, ScriptGoal)
    assert task.goal.command == "export LEVEL='it'\"'\"'s 3'; bash \"${TESTS_DIR:-/tests}/test.sh\""
    assert isinstance(task.solution, ScriptSolution)
    assert task.solution.command == 'bash "${SOLUTION_DIR:-/solution}/solve.sh"'
    assert names_in(task.solution.files) == ["solve.sh"]


def test_the_formats_own_defaults_hold(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "plain", "", {"environment/Dockerfile": "FROM scratch\n"})
    (folder / "solution" / "solve.sh").unlink()
    [task] = load(str(folder), reading())
    assert (task.environment.workdir, task.environment.network) == ("/app", Network.OPEN)
    assert (task.environment.resources.cpus, task.environment.resources.memory_bytes) == (1.0, 2 << 30)
    assert (task.environment.setup, task.environment.reuse) == ((), Reuse.RECYCLED)
    assert task.limits.grading_timeout_s == 600.0
    assert task.solution is None


@pytest.mark.parametrize(
    ("toml", "image", "workdir"),
    [
        ('[environment]\ndocker_image = "example.org/a:1"\n', "example.org/a:1", "/srv/sub"),
        ('[environment]\ndocker_image = "example.org/a:1"\nworkdir = "/srv"\n', "example.org/a:1", "/srv"),
    ],
)
def test_a_prebuilt_image_is_preferred(tmp_path: Path, toml: str, image: str, workdir: str) -> None:
    [task] = load(str(harbor(tmp_path / "a", toml)), reading())
    assert (task.environment.image, task.environment.build, task.environment.workdir) == (image, None, workdir)


@pytest.mark.parametrize(("asked", "service"), [("db", "db"), ("main", None)])
def test_a_service_beside_the_agent_may_judge(tmp_path: Path, asked: str, service: str | None) -> None:
    compose = "services: {db: {image: 'db:1'}}"
    toml = f'[verifier]\nservice = "{asked}"\n'
    [task] = load(str(harbor(tmp_path / "a", toml, {"environment/compose.yaml": compose})), reading())
    assert isinstance(task.goal, ScriptGoal)
    assert task.goal.service == service


def test_several_services_may_judge_each_by_a_script_of_its_own(tmp_path: Path) -> None:
    compose = "services: {db: {image: 'db:1'}, web: {image: 'web:1'}}"
    toml = '[verifier]\nservice = ["main", "db", "web"]\nenv = { A = "b c" }\n'
    folder = harbor(tmp_path / "a", toml, {"environment/compose.yaml": compose, "tests/db/test.sh": "true\n"})
    [task] = load(str(folder), reading())
    assert isinstance(task.goal, ScriptGoal)
    command = "export A='b c'; bash \"${TESTS_DIR:-/tests}/%s\""
    assert (task.goal.service, task.goal.command) == ("main", command % "test.sh")
    also = [(one.service, one.command) for one in task.goal.also]
    assert also == [("db", command % "db/test.sh"), ("web", command % "test.sh")]
    (folder / "tests" / "test.sh").unlink()
    expected = r"tests/main/test\.sh or .*tests/test\.sh: expected the script that judges"
    with pytest.raises(DatasetInvalid, match=expected):
        load(str(folder), reading())


@pytest.mark.parametrize(
    ("services", "complaint"),
    [
        ('["main", "shop"]', r"field verifier\.service: .*found 'shop'; known: db, main"),
        ('["db", "db"]', r"field verifier\.service: .*each once; found \['db', 'db'\]"),
        ("[]", r"field verifier\.service: .*found \[\]"),
        ('"shop"', r"field verifier\.service: .*found 'shop'; known: db, main"),
    ],
)
def test_a_list_of_judges_that_cannot_be_is_named(tmp_path: Path, services: str, complaint: str) -> None:
    compose = "services: {db: {image: 'db:1'}}"
    folder = harbor(tmp_path / "a", f"[verifier]\nservice = {services}\n", {"environment/compose.yaml": compose})
    with pytest.raises(DatasetInvalid, match=complaint):
        load(str(folder), reading())


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        ("[environment", "task.toml: expected TOML; found"),
        ("[environment]\ncpus = 0\n", "field environment.cpus: expected more than 0; found 0"),
        ('[environment]\ncpus = "many"\n', "field environment.cpus"),
        ("[environment]\ngpus = 1\n", "field environment.gpus"),
        ('[environment]\nmemory = "much"\n', "field environment.memory"),
        ('[environment]\nnetwork_mode = "host"\n', "field environment.network_mode"),
        ('[environment]\nenv = { KEY = "${OPENAI_API_KEY}" }\n', "field environment.env.KEY: expected a plain value"),
        ("[environment]\nmemory_mb = 1\n", "field environment.memory_mb: expected at least 16 MiB; found 1"),
        ('[environment]\nmemory = "1M"\n', "field environment.memory: expected at least 16 MiB; found '1M'"),
        ('[environment]\nmemory = "999999999G"\n', "field environment.memory: expected at most [0-9]+ MiB; found"),
        ("[environment]\ncpus = 1e9\n", "field environment.cpus: expected .*; found 1000000000.0"),
        (
            '[verifier.environment]\ndocker_image = "i"\nstorage_mb = 1\n',
            "field verifier.environment.storage_mb: expected at least 64 MiB; found 1",
        ),
        ('[verifier]\nenv = { "A;B" = "1" }\n', "names of environment variables"),
        ('[agent]\nuser = "somebody"\n', "field agent.user"),
        ('[[steps]]\nname = "one"\n', "field steps: expected a task of one step"),
        ('[[environment.mcp_servers]]\nname = "x"\n', "field environment.mcp_servers"),
        ('environment = "x"\n', "field environment"),
        ('[verifier]\nservice = "db"\n', "field verifier.service: .*found 'db'; known: none, without a compose file"),
        ("[environment]\nstorage_mb = 0\n", "field environment.storage_mb: expected more than 0; found 0"),
        ("[environment]\nstorage_mb = 63\n", "field environment.storage_mb: expected at least 64 MiB; found 63"),
        ('[environment]\nstorage = "much"\n', "field environment.storage"),
        (
            '[environment]\nnetwork_mode = "public"\nallowed_hosts = ["a.example"]\n',
            "field environment.network_mode: expected `allowlist`.*found 'public'",
        ),
        (
            '[megaflow]\ncolor = "red"\n',
            "field megaflow.color: expected one of setup, reuse, network, reward_range; found 'red'",
        ),
        ("[megaflow]\nstorage_mb = 100\n", "field megaflow.storage_mb: expected one of setup, reuse, network"),
        ("[megaflow]\nreward_range = [1, 0]\n", r"field megaflow.reward_range: expected the lowest .*found \[1"),
        ("[megaflow]\nreward_range = [0, 1e9]\n", r"field megaflow.reward_range.1"),
        ("megaflow = 1\n", "field megaflow: expected a map with any of setup, reuse, network, reward_range; found 1"),
        ('[megaflow]\nsetup = "make"\n', "field megaflow.setup: .*found 'make'"),
        ('[megaflow]\nsetup = [""]\n', "field megaflow.setup.0"),
        ('[megaflow]\nreuse = "sometimes"\n', "field megaflow.reuse: .*'recycled' or 'shared-readonly'; found"),
        ('[megaflow]\nreuse = "shared-readonly"\n', "task.toml: expected `fresh` or `recycled` with a goal"),
        ('[megaflow]\nnetwork = "open"\n', r"field megaflow.network: expected 'model-only'; .*\.network_mode"),
        (
            '[environment]\nnetwork_mode = "public"\n[megaflow]\nnetwork = "model-only"\n',
            "field megaflow.network: expected no other network beside 'model-only'; found 'public'",
        ),
        (
            '[environment]\nallow_internet = true\n[megaflow]\nnetwork = "model-only"\n',
            "field megaflow.network: expected no other network .*found 'allow_internet = true'",
        ),
    ],
)
def test_a_bad_task_toml_is_named_with_its_field(tmp_path: Path, toml: str, complaint: str) -> None:
    harbor(tmp_path / "good")
    with pytest.raises(DatasetInvalid, match=complaint) as caught:
        load(str(harbor(tmp_path / "tasks" / "bad", toml).parent), reading())
    assert str(tmp_path / "tasks" / "bad" / "task.toml") in str(caught.value)


@pytest.mark.parametrize("verifier", ["", '[verifier]\nenvironment_mode = "separate"\n'])
def test_the_range_of_a_tasks_rewards_is_its_goals(tmp_path: Path, verifier: str) -> None:
    (task,) = load(str(harbor(tmp_path / "a", f"{verifier}[megaflow]\nreward_range = [-1, 60]\n")), reading())
    assert isinstance(task.goal, ScriptGoal)
    assert task.goal.reward_range == (-1.0, 60.0)


@pytest.mark.parametrize(
    ("script", "text", "complaint"),
    [
        ("tests/test.sh", "set -e\r\necho 1\r\n", "expected lines that end with LF alone; found .* line 1"),
        ("tests/test.sh", "", "expected commands; found an empty file"),
        ("solution/solve.sh", " \n", "expected commands; found an empty file"),
        ("solution/solve.sh", "set -e\necho 1\r\n", "expected lines that end with LF alone; found .* line 2"),
    ],
)
def test_scripts_that_bash_would_not_run_and_unknown_keys_are_faults_of_lint_alone(
    tmp_path: Path, script: str, text: str, complaint: str
) -> None:
    folder, strict = harbor(tmp_path / "a"), replace(reading(), strict=True)
    assert len(load(str(folder), strict)) == 1
    unknown = harbor(tmp_path / "b", "colour = 1\n")
    with pytest.raises(DatasetInvalid, match=r"task.toml: field colour: expected one of agent, .*; found 1; remove it"):
        load(str(unknown), strict)
    assert len(load(str(unknown), reading())) == 1
    file = folder / script
    file.write_bytes(text.encode())
    assert len(load(str(folder), reading())) == 1
    with pytest.raises(DatasetInvalid, match=f"{file}: {complaint}"):
        load(str(folder), strict)


def test_a_variable_in_workdir_asks_for_a_plain_one(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a", "", {"environment/Dockerfile": "FROM scratch\nWORKDIR $HOME/x\n"})
    with pytest.raises(DatasetInvalid, match=r"field environment.workdir"):
        load(str(folder), reading())


@pytest.mark.parametrize("gone", ["instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_missing_part_of_a_folder_is_named(tmp_path: Path, gone: str) -> None:
    folder = harbor(tmp_path / "a", "")
    (folder / gone).unlink()
    with pytest.raises(DatasetInvalid, match=gone):
        load(str(folder), reading())


def test_a_linked_folder_is_a_task_by_its_own_name(tmp_path: Path) -> None:
    harbor(tmp_path / "d" / "a")
    (tmp_path / "d" / "b").symlink_to("a")
    assert [task.name for task in load(str(tmp_path / "d"), reading())] == ["a", "b"]


def test_a_list_of_hosts_is_a_network_by_policy(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a", '[environment]\nallowed_hosts = ["example.org", "*.example.com:8443"]\n')
    (task,) = load(str(folder), reading())
    assert task.environment.network is Network.ALLOWLIST
    assert task.environment.allowed_hosts == ("example.org", "*.example.com:8443")
    (none,) = load(str(harbor(tmp_path / "c", '[environment]\nnetwork_mode = "allowlist"\n')), reading())
    assert (none.environment.network, none.environment.allowed_hosts) == (Network.NONE, ()), "an empty list"
    wrong = harbor(tmp_path / "b", '[environment]\nallowed_hosts = ["http://example.org/x"]\n')
    with pytest.raises(DatasetInvalid, match="allowed_hosts: expected `name`"):
        load(str(wrong), reading())


@pytest.mark.parametrize(
    ("said", "memory_bytes", "disk_bytes"),
    [
        ("storage_mb = 1024\n", 2 << 30, 1 << 30),
        ('storage = "1.5G"\n', 2 << 30, 3 << 29),
        ("memory_mb = 512\n", 512 << 20, None),
        ('memory = "1.5G"\n', 3 << 29, None),
    ],
)
def test_what_a_task_may_use_and_write_is_as_it_says(
    tmp_path: Path, said: str, memory_bytes: int, disk_bytes: int | None
) -> None:
    (task,) = load(str(harbor(tmp_path / "a", f"[environment]\n{said}")), reading())
    resources = task.environment.resources
    assert (resources.memory_bytes, resources.disk_bytes) == (memory_bytes, disk_bytes)


@pytest.mark.parametrize("closed", ["", "allow_internet = false\n", 'network_mode = "no-network"\n'])
def test_a_harbor_task_says_in_our_words_what_the_format_has_none_for(tmp_path: Path, closed: str) -> None:
    ours = '[megaflow]\nsetup = ["make", "make install"]\nreuse = "fresh"\nnetwork = "model-only"\n'
    (task,) = load(str(harbor(tmp_path / "a", f"[environment]\n{closed}{ours}")), reading())
    found = task.environment
    assert (found.setup, found.reuse) == (("make", "make install"), Reuse.FRESH)
    assert (found.network, found.allowed_hosts) == (Network.MODEL_ONLY, ())


def test_a_compose_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a")
    elsewhere = folder / "environment" / "mine.yaml"
    elsewhere.write_text("services: {main: {build: .}, other: {image: x}}  # mine\n")
    (folder / "environment" / "docker-compose.yaml").symlink_to(elsewhere)
    (task,) = load(str(folder), reading())
    assert task.environment.compose is not None
    assert elsewhere.read_text().endswith("# mine\n")


def test_a_folder_that_lost_its_task_toml_is_not_passed_over(tmp_path: Path) -> None:
    harbor(tmp_path / "a")
    files(tmp_path / "b", {"instruction.md": "Do it."})
    with pytest.raises(DatasetInvalid, match=r"b: expected task\.toml beside instruction\.md"):
        load(str(tmp_path), reading())


TASK_YAML = (
    "instruction: |-\n  Write hello.\nparser_name: pytest\nmax_agent_timeout_sec: 100\nmax_test_timeout_sec: 30\n"
)
SUMMARY = "=== short test summary info ===\n"


def terminal_bench(folder: Path, output: str = "", more: Mapping[str, str] = NOTHING) -> Path:
    usual = {"task.yaml": TASK_YAML, "run-tests.sh": f"cat <<'EOF'\n{output}\nEOF\n"}
    return task_folders.terminal_bench(folder, {**usual, **more})


def test_a_terminal_bench_folder_becomes_a_task_whose_image_never_holds_the_tests(tmp_path: Path) -> None:
    [task] = load(str(terminal_bench(tmp_path / "hello")), reading())
    assert (task.description, task.environment.workdir, task.environment.network) == (
        "Write hello.",
        "/app",
        Network.OPEN,
    )
    assert task.environment.build
    assert names_in(task.environment.build.context) == ["Dockerfile", "docker-compose.yaml"]
    assert (task.limits.agent_timeout_s, task.limits.grading_timeout_s) == (100.0, 30.0)
    assert isinstance(task.solution, ScriptSolution)
    assert names_in(task.solution.files) == ["solution.sh"]


def test_a_terminal_bench_task_says_more_in_our_words(tmp_path: Path) -> None:
    ours = "megaflow: {setup: [make], reuse: fresh, allowed_hosts: [example.org], storage_mb: 256}\n"
    (task,) = load(str(terminal_bench(tmp_path / "a", more={"task.yaml": TASK_YAML + ours})), reading())
    found = task.environment
    assert (found.setup, found.reuse, found.resources.disk_bytes) == (("make",), Reuse.FRESH, 256 << 20)
    assert (found.network, found.allowed_hosts) == (Network.ALLOWLIST, ("example.org",))
    several = "services: {client: {build: ., mem_limit: 64m}, db: {image: x}}\n"
    words = TASK_YAML + "megaflow: {network: none, storage_mb: 256}\n"
    (more,) = load(
        str(terminal_bench(tmp_path / "b", more={"task.yaml": words, "docker-compose.yaml": several})), reading()
    )
    assert (more.environment.network, more.environment.build) == (Network.NONE, None)
    resources = more.environment.resources
    assert (resources.memory_bytes, resources.disk_bytes) == (64 << 20, 256 << 20)


def judged(task: AgentTask, tmp_path: Path) -> float | None:
    assert isinstance(task.goal, ScriptGoal)
    submission = GradingInput(task, None, STORED[task.goal.tests.sha256])
    return grader_for(task.goal).grade(submission, FolderShell(tmp_path / "environment", "/app")).verdict.reward


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        (f"{SUMMARY}PASSED a.py::test_x\nPASSED a.py::test_y", 1.0),
        (f"\x1b[36m{SUMMARY}\x1b[0m\x1b[32mPASSED\x1b[0m a.py::test_x", 1.0),
        (f"{SUMMARY}PASSED a.py::test_x\nFAILED a.py::test_y - no", 0.0),
        (f"{SUMMARY}PASSED a.py::test_x\nERROR a.py::test_y", 0.0),
        (f"FAILED in a test's own output\n{SUMMARY}PASSED a.py::test_x", 1.0),
        ("PASSED a.py::test_x", 0.0),
        (SUMMARY, 0.0),
        ("", 0.0),
    ],
)
def test_a_terminal_bench_task_is_solved_when_pytest_names_only_passed_tests(
    tmp_path: Path, output: str, reward: float
) -> None:
    [task] = load(str(terminal_bench(tmp_path / "task", output)), reading())
    assert judged(task, tmp_path) == reward


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"task.yaml": "instruction: ''\n"}, "field instruction"),
        ({"task.yaml": "instruction: x\nparser_name: swebench\n"}, "field parser_name"),
        ({"task.yaml": "{"}, "expected YAML"),
        ({"task.yaml": "[]"}, "task.yaml"),
        ({"docker-compose.yaml": "services: {client: {}, database: {}}\n"}, "expected `image` or `build`"),
        ({"docker-compose.yaml": "x"}, "expected a map with `services`"),
        (
            {"task.yaml": f"{TASK_YAML}megaflow: {{colour: red}}\n"},
            "field megaflow.colour: expected one of setup, reuse, network, allowed_hosts, storage_mb; found 'red'",
        ),
        ({"task.yaml": f"{TASK_YAML}megaflow: {{storage_mb: 1}}\n"}, "field megaflow.storage_mb: .*found 1"),
    ],
)
def test_a_bad_terminal_bench_folder_is_named(tmp_path: Path, more: dict[str, str], complaint: str) -> None:
    with pytest.raises(DatasetInvalid, match=complaint):
        load(str(terminal_bench(tmp_path / "task", more=more)), reading())


def test_a_folder_of_datasets_in_several_formats_is_one_dataset(tmp_path: Path) -> None:
    harbor(tmp_path / "mixed" / "tasks" / "b")
    harbor(tmp_path / "mixed" / "tasks" / "a")
    terminal_bench(tmp_path / "mixed" / "older" / "c")
    tasks = load(str(tmp_path / "mixed"), reading())
    assert [(task.name, task.dataset) for task in tasks] == [("c", "mixed"), ("a", "mixed"), ("b", "mixed")]
    harbor(tmp_path / "mixed" / "older2" / "a")
    with pytest.raises(DatasetInvalid, match="'a' twice"):
        load(str(tmp_path / "mixed"), reading())


def test_what_is_not_a_dataset_is_told_what_would_be_one(tmp_path: Path) -> None:
    files(tmp_path, {"data.csv": "", "inner/readme": ""})
    for argument in (tmp_path / "nowhere", tmp_path / "data.csv", tmp_path / "inner", tmp_path):
        with pytest.raises(DatasetInvalid, match=r"the name demo; a \.jsonl file.*Harbor format") as caught:
            load(str(argument), reading())
        assert str(argument) in str(caught.value)


def test_a_link_that_leaves_the_folder_is_the_datasets_fault(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a")
    (folder / "environment" / "link").symlink_to("/etc/passwd")
    with pytest.raises(DatasetInvalid, match=r"task.toml: .*link: expected a relative link"):
        load(str(folder), reading())
