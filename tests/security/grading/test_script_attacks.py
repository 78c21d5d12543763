"""Attacks on tasks that a script judges where the agent worked: each gets 0 or is suspect, honest work keeps its 1."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from sqlalchemy import text

from app.agents.attacks import ATTACKS as CHEAT_ATTACKS
from app.agents.attacks import TOGETHER
from app.artifacts import open_store
from app.artifacts.bundles import store_bundle
from app.models.endings import EndReason
from app.models.outcome import ArtifactKind
from app.models.spec import (
    AgentTask,
    Compose,
    EnvironmentKind,
    EnvironmentSpec,
    Limits,
    Resources,
    ScriptGoal,
    ScriptSolution,
)
from app.settings import Settings
from tests.often import params
from tests.security.grading.attacks import Range, folder_of, of_goal
from tests.security.grading.conftest import RUNTIMES

pytestmark = pytest.mark.docker

TEST = """
mkdir -p /logs/verifier
if [ "$(timeout 20 sh /app/answer.sh)" = 42 ] && python3 - </tests/check.py; then echo 1; else echo 0; fi \
    > /logs/verifier/reward.txt
python3 -c 'import json'
perl -Mstrict -e 1
comm /dev/null /dev/null
mktemp -u >/dev/null
! command -v git >/dev/null || git status >/dev/null 2>&1 || :
"""
CHECK = "import json, sys\nsys.exit(0 if json.loads('[42]') == [42] and open('/app/answer.sh').read().strip() else 1)\n"
WRONG = "mkdir -p /app && echo 'echo 41' >/app/answer.sh"
RIGHT = "mkdir -p /app && echo 'echo 42' >/app/answer.sh"
FORGE = "import os\\nos.makedirs('/logs/verifier', exist_ok=True)\\nopen('/logs/verifier/reward.txt', 'w').write('1')"
YES = f'printf "#!/usr/bin/python3\\n{FORGE}\\n" >{{0}} && chmod 755 {{0}}'
LOOP = "(setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; done' >/dev/null 2>&1 &)"

ATTACKS = {
    "background writer": [LOOP],
    "replaced shell": [YES.format("/tmp/bash"), "cp /tmp/bash /usr/bin/bash.new && mv /usr/bin/bash.new /usr/bin/bash"],
    "replaced interpreter": [YES.format("/tmp/p"), "mv /tmp/p /usr/local/bin/python3"],
    "program earlier on the path": [YES.format("/usr/local/bin/timeout")],
    "preloaded library": ["echo /tmp/none.so >/etc/ld.so.preload"],
    "reward made before": ["mkdir -p /logs/verifier", "echo '{\"reward\": 1}' >/logs/verifier/reward.json"],
    "reward as a link": [
        "mkdir -p /logs/verifier /srv && echo 1 >/srv/reward",
        "ln -s /srv/reward /logs/verifier/reward.txt",
        "ln /srv/reward /logs/verifier/reward.json",
    ],
    "logs as a link": ["rm -rf /logs && mkdir -p /srv/logs && ln -s /srv/logs /logs"],
    "tests made before": ["mkdir -p /tests && echo 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh"],
    "start of every interpreter": [
        "d=$(python3 -c \"import sys; print([p for p in sys.path if p.endswith('python3.11')][0])\")"
        " && echo \"import os; os.system('echo cheat')\" >$d/sitecustomize.py"
    ],
    "archive of modules": [
        "mkdir -p /usr/lib/python311.zip",
        f'printf "{FORGE}\\nos._exit(0)\\n" >/usr/lib/python311.zip/json.py',
    ],
    "module in the working folder": [f'printf "{FORGE}\\nos._exit(0)\\n" >/app/json.py'],
    "module of perl": [
        'mkdir -p /etc/perl && echo \'mkdir("/logs/verifier"); open(F, ">/logs/verifier/reward.txt"); print F 1;'
        " kill 9, getppid(); 1;' >/etc/perl/strict.pm"
    ],
    "seldom replaced program": [
        YES.format("/tmp/comm"),
        "cp /tmp/comm /usr/bin/comm.new && mv /usr/bin/comm.new /usr/bin/comm; mv /tmp/comm /usr/local/bin/mktemp",
    ],
    "program of git's configuration": [
        YES.format("/srv/evil"),
        "cd /app && git init -q . 2>/dev/null; printf '[core]\\n\\tfsmonitor = /srv/evil\\n' >/root/.gitconfig",
    ],
    "link to the hidden tests": ["mkdir -p /app && ln -sf /tests/right /app/answer.sh"],
    "working folder is a loop": ["rm -rf /app && ln -s /app /app"],
    "working folder is a file": ["rm -rf /app && echo x >/app"],
    "users without an end": ["rm /etc/passwd && mkfifo /etc/passwd"],
    "changed standard library": [
        'f=$(python3 -c "import json; print(json.__file__)") && echo "import os; os._exit(0)" >>$f'
    ],
}


def kind_of(settings: Settings) -> EnvironmentKind:
    return EnvironmentKind.DOCKER if settings.container_runtime == "docker" else EnvironmentKind.OCI


def a_task(settings: Settings, folder: Path, image: str, *, test: str = TEST, timeout_s: float = 60.0) -> AgentTask:
    store = open_store(settings.artifacts(), endpoint_url=None)
    tests = store_bundle(store, folder_of(folder / "tests", {"test.sh": test, "check.py": CHECK, "right": "echo 42"}))
    solution = store_bundle(store, folder_of(folder / "solution", {"solve.sh": RIGHT}))
    return AgentTask(
        name="answer",
        description="Make /app/answer.sh print 42.",
        environment=EnvironmentSpec(kind=kind_of(settings), image=image, workdir="/app"),
        goal=ScriptGoal(tests=tests),
        solution=ScriptSolution(files=solution),
        limits=Limits(grading_timeout_s=timeout_s),
    )


@pytest.fixture
def task(range_of_attacks: Range, tmp_path: Path, base_image_tag: str) -> AgentTask:
    return a_task(range_of_attacks.settings, tmp_path, base_image_tag)


@pytest.mark.parametrize("runtime", RUNTIMES, indirect=True)
def test_honest_work_keeps_its_reward(range_of_attacks: Range, task: AgentTask) -> None:
    install = "d=$(python3 -c 'import site; print(site.getsitepackages()[0])'); mkdir -p $d; echo /app >$d/app.pth"
    own = "mkdir -p bin && ln -s /usr/bin/python3 bin/python3 && cp /usr/bin/date bin/date"
    seen = "test -x /app/bin/python3 && test -x /app/bin/date && echo 42"
    product = f"{own} && printf '%s\\n' '{seen}' >/app/answer.sh"
    program = "printf '#!/bin/sh\\n' >/usr/local/bin/report"
    verdict = range_of_attacks.verdict(task, RIGHT, install, program, f"cd /app && {product}")
    assert (verdict.reward, verdict.suspect) == (1.0, "")


OFTEN = (
    *("working folder is a loop", "users without an end"),
    *("background writer", "replaced interpreter", "preloaded library", "reward as a link"),
    *("start of every interpreter", "program of git's configuration", "changed standard library"),
)


@pytest.mark.parametrize("attack", params(ATTACKS, OFTEN))
def test_an_attack_buys_nothing(range_of_attacks: Range, task: AgentTask, attack: str) -> None:
    verdict = range_of_attacks.verdict(task, WRONG, *ATTACKS[attack])
    assert verdict.reward == 0.0
    assert verdict.counts


ALONE = ("late-reward", "git-programs", "git-hooks", "installed-plugin")
CHEAT = {"together": TOGETHER, **{name: (name,) for name in ALONE}}


@pytest.mark.parametrize("chosen", params(CHEAT, ("together", "late-reward")))
def test_what_cheat_does_buys_nothing(range_of_attacks: Range, task: AgentTask, chosen: str) -> None:
    scripts = [f"cd /app\n{CHEAT_ATTACKS[name].script}" for name in CHEAT[chosen]]
    verdict = range_of_attacks.verdict(task, WRONG, *scripts)
    assert (verdict.reward, verdict.counts) == (0.0, True)
    assert not verdict.suspect or chosen in ALONE, "what makes all suspect is done alone"


def test_a_writer_that_the_program_under_test_starts_makes_the_reward_suspect(
    range_of_attacks: Range, task: AgentTask
) -> None:
    writer = LOOP.replace("'", "'\\''")
    verdict = range_of_attacks.verdict(task, f"mkdir -p /app && printf '%s\\n' '{writer}' 'echo 41' >/app/answer.sh")
    assert verdict.reward == 0.0
    assert "after the tests had ended" in verdict.suspect or verdict.claimed_reward is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("rm -f /tests/check.py; kill -9 -1", "broke grading"),
        ("(setsid sh -c 'while :; do rm -rf /logs/verifier; done' >/dev/null 2>&1 &) ; echo 42", "broke grading"),
    ],
    ids=["kills-its-judge", "deletes-the-reward"],
)
def test_a_submission_that_breaks_its_grading_twice_is_its_own_failure(
    range_of_attacks: Range, task: AgentTask, answer: str, why: str
) -> None:
    quoted = answer.replace("'", "'\\''")
    verdict = range_of_attacks.verdict(task, f"mkdir -p /app && printf '%s\\n' '{quoted}' >/app/answer.sh")
    assert verdict.reward == 0.0
    assert why in verdict.detail


def test_a_grading_that_hangs_for_the_gold_solution_too_is_not_scored(
    range_of_attacks: Range, tmp_path: Path, base_image_tag: str
) -> None:
    task = a_task(range_of_attacks.settings, tmp_path, base_image_tag, test="sleep 60\n", timeout_s=2.0)
    result = range_of_attacks.attempt(task, [RIGHT])
    assert result.verdict is None


def test_a_grading_that_hangs_for_the_submission_alone_is_its_failure(
    range_of_attacks: Range, tmp_path: Path, base_image_tag: str
) -> None:
    test = "sh /app/answer.sh >/dev/null\necho 1 >/logs/verifier/reward.txt\n"
    task = a_task(range_of_attacks.settings, tmp_path, base_image_tag, test=test, timeout_s=3.0)
    verdict = range_of_attacks.verdict(task, "mkdir -p /app && echo 'sleep 60' >/app/answer.sh")
    assert (verdict.reward, verdict.detail.startswith("broke grading")) == (0.0, True)


def test_a_disk_that_the_program_under_test_fills_is_the_submissions_failure(
    range_of_attacks: Range, task: AgentTask
) -> None:
    small = task.environment.model_copy(update={"resources": Resources(disk_bytes=64 << 20)})
    limited = task.model_copy(update={"environment": small})
    fill = f"{RIGHT}; echo 'head -c 256M /dev/zero >/srv/fill; sleep 15' >>/app/answer.sh"
    verdict = range_of_attacks.verdict(limited, fill)
    assert (verdict.reward, verdict.counts) == (0.0, True), verdict.detail
    assert "disk" in verdict.detail


@pytest.fixture
def apart(range_of_attacks: Range, task: AgentTask, base_image_tag: str) -> AgentTask:
    """The same task, judged in an environment of the verifier's own; only the answer is handed over."""
    own = EnvironmentSpec(kind=kind_of(range_of_attacks.settings), image=base_image_tag, workdir="/app")
    return of_goal(task, environment=own, artifacts=("/logs/artifacts", "/app/answer.sh", "/etc/issue"))


@pytest.mark.parametrize("runtime", RUNTIMES, indirect=True)
def test_a_verifier_apart_gets_what_is_listed_and_nothing_else(range_of_attacks: Range, apart: AgentTask) -> None:
    result = range_of_attacks.attempt(apart, [RIGHT])
    assert result.reward == 1.0
    (bundle,) = (one for one in result.artifacts if one.kind is ArtifactKind.HANDED_OVER)
    content = open_store(range_of_attacks.settings.artifacts(), endpoint_url=None).get(str(bundle.key))
    assert b"echo 42" in content, "the attempt's artifacts list what the verifier got"
    assert (bundle.size_bytes, bundle.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    several = ("background writer", "reward made before", "tests made before", "replaced interpreter")
    attack = [command for name in several for command in ATTACKS[name]]
    assert range_of_attacks.verdict(apart, WRONG, *attack).reward == 0.0


def test_what_a_verifier_apart_got_is_graded_anew_and_a_grading_without_a_score_by_graders(
    range_of_attacks: Range, apart: AgentTask
) -> None:
    database, here = range_of_attacks.database, range_of_attacks
    assert here.attempt(apart, [RIGHT]).reward == 1.0
    with database.begin() as connection:
        for table in ("attempts", "tasks"):
            wrong = "jsonb_build_object('reward', 0, 'counts', true)"
            connection.execute(text(f"UPDATE {table} SET verdict = {wrong}"))
    assert next(iter(here.regraded()["left_out"])).startswith("its goal is a script")
    assert here.regraded("--anew")["solved_now"] == 1
    assert here.attempt(of_goal(apart, command="true"), [RIGHT]).verdict is None
    with database.begin() as connection:
        failed = "UPDATE tasks SET state = 'failed', end_reason = 'grading_error' WHERE state = 'pending'"
        assert connection.execute(text(failed)).rowcount == 1
    assert next(iter(here.regraded()["left_out"])).startswith("its grading never came to a score")
    assert here.regraded("--anew")["queued"] == 1
    assert here.attempt(of_goal(apart, environment=None, artifacts=()), [RIGHT]).reward == 1.0
    assert next(iter(here.regraded("--anew")["left_out"])).endswith("which is gone: submit the task again")


def test_a_gold_solution_that_hands_over_too_much_is_not_the_agents_failure(
    range_of_attacks: Range, apart: AgentTask, tmp_path: Path
) -> None:
    store = open_store(range_of_attacks.settings.artifacts(), endpoint_url=None)
    large = {"solve.sh": "mkdir -p /logs/artifacts && truncate -s 300M /logs/artifacts/big"}
    solution = ScriptSolution(files=store_bundle(store, folder_of(tmp_path / "large", large)))
    silent = of_goal(apart, command="true").model_copy(update={"solution": solution})
    result = range_of_attacks.attempt(silent, [RIGHT])
    assert (result.verdict, result.attempts[-1].end_reason) == (None, EndReason.GRADING_ERROR)


@pytest.mark.parametrize("module", ["json.py", "pytest/__init__.py"])
def test_a_module_handed_over_to_a_verifier_apart_is_suspect(
    range_of_attacks: Range, apart: AgentTask, module: str
) -> None:
    task = of_goal(apart, artifacts=("/app",))
    assert range_of_attacks.verdict(task, RIGHT, "mkdir -p /app/tools && touch /app/tools/json.py").reward == 1.0
    verdict = range_of_attacks.verdict(task, RIGHT, f"cd /app && mkdir -p $(dirname {module}) && touch {module}")
    assert (verdict.reward, module in verdict.suspect) == (0.0, True)


def test_an_agent_in_several_containers_is_judged_apart_in_a_copy_of_all(
    range_of_attacks: Range, apart: AgentTask, tmp_path: Path, base_image_tag: str
) -> None:
    store = open_store(range_of_attacks.settings.artifacts(), endpoint_url=None)
    services = "".join(
        f"  {name}: {{image: '{base_image_tag}', command: [sleep, '600']}}\n" for name in ("main", "shop")
    )
    context = store_bundle(store, folder_of(tmp_path / "two", {"docker-compose.yaml": f"services:\n{services}"}))
    both = EnvironmentSpec(kind=EnvironmentKind.DOCKER, compose=Compose(context=context), workdir="/app")
    task = of_goal(apart, environment=both).model_copy(update={"environment": both})
    assert range_of_attacks.verdict(task, RIGHT, *ATTACKS["replaced interpreter"]).reward == 1.0
    assert range_of_attacks.verdict(task, WRONG, *ATTACKS["background writer"]).reward == 0.0


def test_a_verifier_apart_without_an_answer_is_a_failure_of_the_submission(
    range_of_attacks: Range, apart: AgentTask
) -> None:
    assert range_of_attacks.verdict(apart, "true").reward == 0.0


HANDED_OVER = {
    "a link to the tests": "mkdir -p /logs/artifacts && ln -s /tests/test.sh /logs/artifacts/answer.sh",
    "a folder that is a link to the tests": "mkdir -p /logs && ln -s /tests /logs/artifacts",
    "a folder that is a link to the kernel's": "mkdir -p /logs && ln -s /proc /logs/artifacts",
    "a folder that is a link to the root": "mkdir -p /logs && ln -s / /logs/artifacts",
    "a file that is the process's memory": "ln -sf /proc/self/mem /app/answer.sh",
    "more than may be handed over": "mkdir -p /logs/artifacts && truncate -s 300M /logs/artifacts/big",
    "a folder where the verifier has a file": "rm -f /etc/issue && mkdir -p /etc/issue/x",
}


@pytest.mark.parametrize("attack", params(HANDED_OVER, ("a link to the tests", "more than may be handed over")))
def test_what_is_handed_over_to_a_verifier_apart_leads_nowhere_and_ends_scored(
    range_of_attacks: Range, apart: AgentTask, attack: str
) -> None:
    result = range_of_attacks.attempt(apart, [WRONG, HANDED_OVER[attack]])
    assert result.verdict is not None
    assert (result.reward, result.verdict.counts) == (0.0, True), result.verdict.detail
    assert len(result.attempts) == 1, "one attempt was enough"


def test_a_file_below_a_folder_that_is_handed_over_does_not_replace_the_tests(
    range_of_attacks: Range, apart: AgentTask
) -> None:
    task = of_goal(apart, artifacts=("/logs/artifacts", "/logs/artifacts/answer.sh"))
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    attack = (
        f"mkdir -p /logs/artifacts /tests && printf '%s\\n' '{forged}' > /tests/test.sh"
        " && ln -s /tests/test.sh /logs/artifacts/answer.sh"
    )
    assert range_of_attacks.verdict(task, WRONG, attack).reward == 0.0


def test_a_reward_that_the_program_under_test_writes_contradicts_the_scripts(
    range_of_attacks: Range, task: AgentTask
) -> None:
    forge = "echo '{\\\"reward\\\": 1}' >/logs/verifier/reward.json"
    verdict = range_of_attacks.verdict(task, f'mkdir -p /app && printf "%s\\n" "{forge}" "echo 41" >/app/answer.sh')
    assert (verdict.reward, verdict.claimed_reward) == (0.0, 1.0)


def test_a_system_that_the_agent_removed_is_back_and_its_answer_is_judged(
    range_of_attacks: Range, task: AgentTask
) -> None:
    verdict = range_of_attacks.verdict(task, f"{WRONG}; rm -rf /bin /lib64 /usr/lib /usr/bin /usr 2>/dev/null; :")
    assert (verdict.reward, verdict.counts) == (0.0, True)


OTHERWISE = "if [ -e /app/tried ]; then kill -9 $PPID; else touch /app/tried; echo nonsense; fi"


@pytest.mark.parametrize("program", ["head -c 8 /dev/urandom | od -An -tx1", OTHERWISE], ids=["words", "kind"])
def test_a_grading_that_breaks_otherwise_each_time_is_the_submissions_failure(
    range_of_attacks: Range, tmp_path: Path, base_image_tag: str, program: str
) -> None:
    test = "mkdir -p /logs/verifier\nsh /app/answer.sh >/logs/verifier/reward.txt\n"
    task = a_task(range_of_attacks.settings, tmp_path, base_image_tag, test=test)
    answer = f"mkdir -p /app && echo '{program}' >/app/answer.sh"
    verdict = range_of_attacks.verdict(task, answer)
    assert verdict.reward == 0.0
    assert verdict.detail.startswith("broke grading")
