"""Rows whose tests are pytest's: SWE-bench, Verified, SWE-Gym, SWE-rebench, SWE-smith, SWE-Flow, and one's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tests.matrix.fixture import KINDS, PYTEST_FIXED, PYTEST_KEPT, Fixture, Kind, classic, named, without
from tests.matrix.repository import (
    FILES,
    HIDDEN_TESTS,
    RIGHT_ANSWER,
    SENTENCE,
    TEST_FILE,
    Image,
    Patches,
    Repository,
    git,
    prepared,
)

EDITABLE = "/testbed/src"
"""Where Python finds the package of an image that has it installed as `pip install -e` does."""


def swebench_image(owner: str, name: str, separator: str = "_1776_") -> str:
    """Source: swebench 4.1.0, TestSpec.instance_image_key."""
    return f"{owner}/sweb.eval.x86_64.{name.replace('__', separator).lower()}:latest"


def _two_images(names: Mapping[Kind, str]) -> tuple[Image, ...]:
    """Of the plain tasks, with the package as `pip install -e` has it; and of the peculiar one, with a copy of it."""
    return (
        Image(tuple(swebench_image("swebench", names[kind]) for kind in KINDS[:2]), imported_from=EDITABLE),
        Image((swebench_image("swebench", names[Kind.PECULIAR]),)),
    )


def swe_bench(patches: Patches) -> Fixture:
    names = {**named("pallets__flask-900{}"), Kind.PECULIAR: "psf__requests-9003"}
    about = {Kind.PECULIAR: ("psf/requests", "2.31")}
    return Fixture(
        dataset="swe-bench",
        title="SWE-bench",
        source="the dataset card SWE-bench/SWE-bench; commands of swebench 4.1.0 for pallets/flask 2.3, psf/requests",
        peculiarity="the image has a plain copy of the package: only `pip install .` after the patch makes it count",
        names=names,
        rows=tuple(classic(patches, kind, names[kind], *about.get(kind, ("pallets/flask", "2.3"))) for kind in KINDS),
        images=_two_images(names),
    )


def verified(patches: Patches) -> Fixture:
    names = named("psf__requests-901{}")
    script = (
        "#!/bin/bash\nset -uxo pipefail\nsource /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed\n"
        f"git checkout {patches.base} {TEST_FILE}\ngit apply -v - <<'EOF_114329324912'\n{patches.hidden}\n"
        f"EOF_114329324912\n: '>>>>> Start Test Output'\npytest -rA {TEST_FILE}\n: '>>>>> End Test Output'\n"
        f"git checkout {patches.base} {TEST_FILE}\n"
    )
    more = {"log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "eval_script": script}
    install = script.replace("cd /testbed\n", "cd /testbed\npython -m pip install .\n")
    scripts = {Kind.PECULIAR: {"eval_script": install}}
    return Fixture(
        dataset="swe-bench-verified",
        title="SWE-bench Verified",
        source="swebench 5.0.2, harness/utils.py (make_test_spec)",
        peculiarity="the row's own script installs, lays the hidden tests out and marks what counts",
        names=names,
        rows=tuple(
            classic(patches, kind, names[kind], "psf/requests", "2.31", image=swebench_image("swebench", names[kind]))
            | more
            | scripts.get(kind, {})
            for kind in KINDS
        ),
        images=_two_images(names),
        in_table=False,
    )


def swe_gym(patches: Patches) -> Fixture:
    names = {**named("facebookresearch__hydra-900{}"), Kind.PECULIAR: "pydantic__pydantic-9003"}
    about = {Kind.PECULIAR: ("pydantic/pydantic", "2.6")}
    return Fixture(
        dataset="swe-gym",
        title="SWE-Gym",
        source="the dataset card SWE-Gym/SWE-Gym; SWE-Gym/SWE-Bench-Fork at 242429c1, harness/constants.py",
        peculiarity="pydantic's report is read in a way of the fork's own; images are xingyaoww's, named with `_s_`",
        names=names,
        rows=tuple(
            without(
                classic(patches, kind, names[kind], *about.get(kind, ("facebookresearch/hydra", "1.3"))),
                "environment_setup_commit",
            )
            for kind in KINDS
        ),
        images=(
            Image(tuple(swebench_image("xingyaoww", name, "_s_") for name in names.values()), imported_from=EDITABLE),
        ),
    )


def swe_rebench(patches: Patches) -> Fixture:
    names = named("oemof__tespy-900{}")
    config = {
        "env_vars": None, "env_yml_path": None, "install": "pip install -e .", "log_parser": "parse_log_pytest",
        "no_use_env": None, "packages": "requirements.txt", "pip_packages": ["pytest"], "pre_install": None,
        "python": "3.9", "reqs_path": None, "test_cmd": "pytest --no-header -rA --tb=line --color=no",
    }  # fmt: skip
    own = {**config, "eval_commands": ["export SHOP=--no-header"], "test_cmd": "pytest ${SHOP:?} -rA --color=no"}
    configs = {Kind.PECULIAR: json.dumps(own)}
    return Fixture(
        dataset="swe-rebench",
        title="SWE-rebench",
        source="the dataset card nebius/SWE-rebench; SWE-rebench/SWE-bench-fork, harness/test_spec/python.py",
        peculiarity="`install_config` as JSON in a text, with `eval_commands` without which the test command fails",
        names=names,
        rows=tuple(
            classic(patches, kind, names[kind], "oemof/tespy", "0.8", install_config=configs.get(kind, config))
            for kind in KINDS
        ),
        images=(Image(tuple(swebench_image("swerebench", one) for one in names.values()), imported_from=EDITABLE),),
    )


SMITH = "oauthlib__oauthlib.1fd52536"
_NOTED = {"src/shop/__init__.py": '"""A shop."""\n'}
_CART = {"src/shop/cart.py": FILES["src/shop/cart.py"]}


def _branches(repository: Repository) -> tuple[str, str]:
    """main is right; each task has a branch with the bug, and above it without the failing tests: swesmith 0.0.9,
    harness/gather.py. The two bugs as patches."""
    repository.commit("the mirror", {**HIDDEN_TESTS, **RIGHT_ANSWER})
    bugs = repository.patch(_CART), repository.patch(_NOTED)
    for kind, name in named(f"{SMITH}.func_basic__{{}}").items():
        git(repository.folder, "checkout", "-q", "-b", name, "main")
        repository.commit("Bug Patch", _CART | (_NOTED if kind is Kind.WRONG else {}))
        if kind is Kind.PECULIAR:
            repository.commit("Remove F2P Tests", {TEST_FILE: "assert False\n"})
        else:
            repository.commit("Remove F2P Tests", remove=(TEST_FILE,))
    git(repository.folder, "checkout", "-q", "main")
    return bugs


def swe_smith(patches: Patches) -> Fixture:
    del patches
    names = named(f"{SMITH}.func_basic__{{}}")
    bug, noted = prepared(_branches)
    image = "swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536"
    return Fixture(
        dataset="swe-smith",
        title="SWE-smith",
        source="the dataset card SWE-bench/SWE-smith; swesmith 0.0.9, harness/gather.py and profiles/python.py",
        peculiarity="`patch` is the bug and its reverse the answer; a test that the branch spoiled is put back",
        names=names,
        rows=tuple(
            {
                "instance_id": name, "repo": f"swesmith/{SMITH}", "patch": noted if kind is Kind.WRONG else bug,
                "FAIL_TO_PASS": [PYTEST_FIXED], "PASS_TO_PASS": list(PYTEST_KEPT), "created_at": "2025-05-01",
                "image_name": image, "problem_statement": f"{SENTENCE}\nCorrect it.",
            }
            for kind, name in names.items()
        ),
        images=(Image((image,), imported_from=EDITABLE, prepare=_branches),),
    )  # fmt: skip


def _at_base(repository: Repository) -> str:
    return repository.commit("the tests of the next step", HIDDEN_TESTS)


def _at_reference(repository: Repository) -> str:
    _at_base(repository)
    return repository.commit("the next step", RIGHT_ANSWER)


def swe_flow(patches: Patches) -> Fixture:
    names = named("httpkit-00{}")
    base, reference = prepared(_at_base), prepared(_at_reference)
    images = dict.fromkeys(KINDS, "sweflow/matrix-step:latest") | {Kind.PECULIAR: "sweflow/matrix:latest"}

    def image(kind: Kind, prepare: Callable[[Repository], str]) -> Image:
        """The environment is a copy in another folder."""
        return Image((images[kind],), imported_from="/workspace/src", workdir="/workspace", prepare=prepare)

    return Fixture(
        dataset="swe-flow",
        title="SWE-Flow",
        source="Hambaobao/SWE-Flow-Bench, sweflow_bench/utils/data.py and run_evaluation.py",
        peculiarity="the image stands at the reference commit; the task is a copy in /workspace at the base commit",
        names=names,
        rows=tuple(
            {
                "instance_id": name, "repo": "SWE-Flow/httpkit", "problem_statement": f"{SENTENCE}\nCorrect it.",
                "base_commit": base, "reference_commit": reference, "docker_image": images[kind],
                "patch": patches.wrong if kind is Kind.WRONG else patches.right,
                "FAIL_TO_PASS": [PYTEST_FIXED], "PASS_TO_PASS": list(PYTEST_KEPT),
            }
            for kind, name in names.items()
        ),
        images=(
            image(Kind.RIGHT, _at_base),
            image(Kind.PECULIAR, _at_reference),
        ),
    )  # fmt: skip


def own(patches: Patches) -> Fixture:
    names = named("example__shop-{}")
    commands = {Kind.PECULIAR: ["export SHOP=--no-header", f"pytest ${{SHOP:?}} -rA {TEST_FILE}"]}
    return Fixture(
        dataset="own",
        title="Own rows",
        source="app/datasets/README.md, Rows",
        peculiarity="`test_cmd` is a list of commands in one shell",
        names=names,
        rows=tuple(
            without(classic(patches, kind, name, "example/shop", "1"), "version", "environment_setup_commit")
            | {"test_cmd": commands.get(kind, f"pytest -rA {TEST_FILE}"), "image_name": "example/shop:latest"}
            for kind, name in names.items()
        ),
        images=(Image(("example/shop:latest",), imported_from=EDITABLE),),
        in_table=False,
    )
