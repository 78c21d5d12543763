"""Reads SWE-Gym and SWE-Gym Lite: classic columns, whose repositories only SWE-Gym's fork of SWE-bench knows.

The fork is on no package index, so its data is copied here: `install`, `eval_commands` and `test_cmd` of its table, but
not commands that only build an image, nor spyder, of which it has no version. It evaluates like SWE-bench 2: activate,
`eval_commands`, `install` after the patch, then the test command with the files of the test patch; for mypy with the
names of the cases in the patch.

Source: SWE-Gym/SWE-Bench-Fork at 242429c1, harness/test_spec.py (make_eval_script_list, make_test_command),
harness/constants.py (MAP_REPO_VERSION_TO_SPECS, whose names are lower case there), harness/utils.py
(get_test_directives), harness/log_parsers.py; images: xingyaoww, as OpenHands uses them
(evaluation/benchmarks/swe_bench: `_s_` in place of `__`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from app.datasets.base import Reading, Row
from app.datasets.rows.columns import RowColumns
from app.datasets.rows.environments import CONDA, image_by_id, script
from app.datasets.rows.goals import NEEDED, judged_by_parser, named_tests, patched_files, row_task, swebench_parser
from app.models.spec import AgentTask, JudgeName, TestsGoal

PYDANTIC_REPORT = "swe-gym-pydantic"
"""Our parser of the reports that the fork reads in its own way."""
_PYTEST = "parse_log_pytest"
_CASE = re.compile(r"\[case ([^\]]+)\]")


@dataclass(frozen=True, slots=True)
class GymCommands:
    """Commands of some versions, whose names are separated by blanks."""

    versions: str
    test: str
    install: str
    before: str = ""


class SweGymRows:
    """Rules of SWE-Gym."""

    name: ClassVar[str] = "swe-gym"
    columns: ClassVar[frozenset[str]] = NEEDED | {"version", "test_patch"}

    def recognises(self, row: Mapping[str, Any]) -> bool:
        """Returns False: its columns are SWE-bench's, so users of its rows must name the dataset."""
        return False

    def task(self, row: Row, reading: Reading) -> AgentTask:
        columns = RowColumns.of(row, self.columns, self.name)
        with row.place.named():
            return row_task(
                row,
                columns,
                reading,
                _goal(columns, reading),
                image=image_by_id("xingyaoww", columns.name(), "_s_"),
                commands=CONDA,
            )


def _goal(columns: RowColumns, reading: Reading) -> TestsGoal:
    repository = "/".join(columns.repository()).lower()
    known = _commands(columns, repository)
    test_patch = columns.patch("test_patch", needed=True)
    before = script(CONDA, known.before)
    pydantic = repository == "pydantic/pydantic"
    if not pydantic:
        swebench_parser(columns, reading, _PYTEST, "repo")
    return TestsGoal(
        base_commit=columns.commit(),
        test_patch=test_patch,
        install_command=script(before, known.install),
        test_command=script(before, f"{known.test} {_chosen(columns, repository, test_patch)}"),
        judge=JudgeName.OWN if pydantic else JudgeName.SWEBENCH_5,
        log_parser=PYDANTIC_REPORT if pydantic else _PYTEST,
        row={} if pydantic else judged_by_parser(columns),
        **named_tests(columns),
    )


def _commands(columns: RowColumns, repository: str) -> GymCommands:
    """Raises: DatasetInvalid: the fork knows no such repository, or no such version of it."""
    if repository not in VERSIONS:
        raise columns.fault("repo", f"one of {', '.join(sorted(VERSIONS))}")
    version = columns.text("version")
    commands = next((one for one in VERSIONS[repository] if version in one.versions.split()), None)
    if commands is None:
        known = " ".join(one.versions for one in VERSIONS[repository])
        raise columns.fault("version", f"one of {repository} that SWE-Gym has commands for: {known}")
    return commands


def _chosen(columns: RowColumns, repository: str, test_patch: str) -> str:
    """Returns the arguments of the test command. Raises: DatasetInvalid: the patch names no test."""
    if repository == "python/mypy":
        cases = " or ".join(_CASE.findall(test_patch))
        chosen = shlex.quote(cases) if cases else ""
    else:
        chosen = " ".join(patched_files(test_patch))
    if not chosen:
        raise columns.fault("test_patch", "a patch of test files")
    return chosen


_MYPY = "python -m pip install -r test-requirements.txt; python -m pip install -e .; "
_CONAN = (
    "python -m pip install -r conans/requirements.txt; python -m pip install -r conans/requirements_server.txt; "
    "python -m pip install -r conans/requirements_dev.txt "
)
_CONAN_PATH = "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)"
_DVC = (
    'python -m pip install --upgrade pip wheel GitPython; python -m pip install "cython<3.0.0" && '
    "python -m pip install --no-build-isolation pyyaml==5.4.1; "
    "python -m pip install git+https://github.com/iterative/mock-ssh-server.git || true; "
    "python -m pip install -r tests/requirements.txt || true; "
    "python -m pip install -r test-requirements.txt || true; "
    'python -m pip install -e ".[tests,dev,all_remotes,all,testing]";'
)
_DVC_OLD = ' python -m pip install "numpy<=1.20"; python -m pip install "pytest<8";'
_HYDRA = "pip install -r requirements/dev.txt; pip install -e .;"
_HYDRA_OLD = (
    "sed -i 's|isort@git+git://github.com/timothycrosley/isort|isort@git+https://github.com/timothycrosley/isort|g'"
    " requirements/dev.txt; "
    '{ tail -n1 requirements/requirements.txt | grep -q "." && echo ""; } >> requirements/requirements.txt;'
    ' echo "pip==24.0" >> requirements/requirements.txt;pip install "pip==24.0"; '
)
_PANDAS = "python -m pip install -ve . --no-build-isolation -Ceditable-verbose=true; pip uninstall pytest-qt -y;"

VERSIONS: Mapping[str, tuple[GymCommands, ...]] = {
    "python/mypy": (
        GymCommands("1.7 1.8 1.9 1.10 1.11", "pytest -rA -k", f"{_MYPY}hash -r"),
        GymCommands("1.0 1.1 1.2 1.3 1.4 1.5 1.6", "pytest -n0 -rA -k", f"{_MYPY}hash -r"),
        GymCommands(
            "0.990 0.980 0.970 0.960 0.950 0.940",
            "pytest -n0 -rA -k",
            f"{_MYPY}pip install pytest pytest-xdist; hash -r",
        ),
        GymCommands(
            "0.920 0.910 0.820 0.810 0.800", "pytest -n0 -rA -k", f"{_MYPY}pip install pytest pytest-xdist; hash -r;"
        ),
    ),
    "getmoto/moto": (
        GymCommands("0.4 1.0 1.2 1.3 2.0 2.1 2.2 2.3 3.0 3.1 4.0 4.1 4.2 5.0", "pytest -n0 -rA", "make init"),
    ),
    "conan-io/conan": (
        GymCommands(
            "1.33 1.34 1.36 2.0 1.35 1.37 1.46 1.38 1.39 1.40 1.41 1.42 1.45 1.43 1.44 1.47 1.48 1.49 1.50 1.51 1.52"
            " 1.53 1.55 1.54 1.57 1.58 1.59",
            "pytest -n0 -rA",
            f"echo 'cython<3' > /tmp/constraint.txt; export PIP_CONSTRAINT=/tmp/constraint.txt; {_CONAN}",
            _CONAN_PATH,
        ),
        GymCommands("2.1 1.60 1.61 1.62 2.2 2.3 2.4", "pytest -n0 -rA", _CONAN, _CONAN_PATH),
    ),
    "dask/dask": (
        GymCommands(
            "2.11 2.12 2.13 2.14 2.15 2.16 2.17 2.18 2.19 2.21 2.22 2.23 2.25 2.26 2.27 2.28 2.29 2.30 2020.12 2021.01"
            " 2021.02 2021.03 2021.04 2021.05 2021.06 2021.07 2021.08 2021.09 2021.10 2021.11 2021.12 2022.01 2022.02"
            " 2022.03 2022.04 2022.05 2022.6 2022.7 2022.8 2022.9 2022.10 2022.11 2022.12 2023.1 2023.2 2023.3 2023.4"
            " 2023.5 2023.6 2023.7 2023.8 2023.9 2023.10 2023.11 2023.12 2024.1 2024.2 2024.3 2024.4 2024.5",
            "pytest -n0 -rA  --color=no",
            "python -m pip install --no-deps -e .",
        ),
    ),
    "project-monai/monai": (
        GymCommands(
            "0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 0.11 0.105 1.0 1.1 1.2 1.3",
            "pytest -rA ",
            r"sed -i '/^git+https:\/\/github.com\/Project-MONAI\//d' requirements-dev.txt; "
            "python -m pip install types-pkg-resources==0.1.3 pytest; pip install -r requirements-dev.txt;"
            "python setup.py develop;",
        ),
    ),
    "iterative/dvc": (
        GymCommands(
            "0.1 0.8 0.9 0.12 0.13 0.14 0.15 0.16 0.17 0.18 0.19 0.20 0.21 0.22 0.23 0.24 0.27 0.28 0.29 0.30 0.31 0.32"
            " 0.33 0.34 0.35 0.40 0.41 0.50 0.51 0.52 0.53 0.54 0.55 0.56 0.57 0.58 0.59 0.60 0.61 0.62 0.63 0.65 0.66"
            " 0.68 0.69 0.70 0.71 0.74 0.75 0.76 0.77 0.78 0.80 0.81 0.82 0.83 0.84 0.85 0.86 0.87 0.88 0.89 0.90 0.91"
            " 0.92 0.93 1.0 1.1 1.2 1.3 1.4 1.5 1.6 1.7 1.8 1.9 1.10 1.11 2.0 2.1 2.2 2.3 2.4 2.5 2.6 2.7 2.8 2.9 2.10"
            " 2.11 2.12 2.13 2.15 2.17 2.19 2.20 2.21 2.22 2.23 2.24 2.27 2.28 2.30 2.33 2.34 2.35 2.38 2.41 2.43 2.44"
            " 2.45 2.46 2.48 2.50 2.51 2.52 2.54 2.55 2.56 2.57 2.58 3.0 3.1 3.2 3.3",
            "pytest -rA",
            _DVC + _DVC_OLD,
        ),
        GymCommands(
            "3.4 3.5 3.6 3.10 3.11 3.12 3.13 3.14 3.15 3.17 3.19 3.23 3.24 3.28 3.29 3.36 3.37 3.38 3.43 3.47"
            " 3.48 3.49",
            "pytest -rA",
            _DVC,
        ),
    ),
    "bokeh/bokeh": (
        GymCommands(
            "3.0 3.3 3.4 3.5", "pytest -rA -n0", "python -m pip install -e .; python -m pip install bokeh_sampledata;"
        ),
        GymCommands(
            "2.0 2.1 2.3 2.4 0.4 0.5 0.6 0.7 0.8 0.9 0.10 0.11 0.12 0.13 0.1181316818 1.0 1.1 1.2 1.3 1.4",
            "pytest -rA -n0",
            'pip install "setuptools<66" "jinja2<3.1"; printf "1\n" | python setup.py develop; bokeh sampledata;',
        ),
    ),
    "modin-project/modin": (
        GymCommands(
            "0.1 0.2 0.3 0.4 0.6 0.8 0.9 0.10 0.11 0.12 0.13 0.14 0.15 0.16 0.17 0.18 0.19",
            "pytest -n0 -rA",
            "python -m pip install -e .; python -m pip install numpy==1.23.1 protobuf==3.20.1;",
        ),
        GymCommands(
            "0.20 0.21 0.22 0.23 0.24 0.25 0.26 0.27 0.28 0.29 0.30", "pytest -n0 -rA", "python -m pip install -e .;"
        ),
    ),
    "hypothesisworks/hypothesis": (
        GymCommands(
            "3.55 3.61 3.60 3.59 3.63 3.66 3.67 3.68 3.69 3.70 5.1 5.5 5.24 5.6 5.9 5.8 5.10 5.12 5.15 5.20 5.23 5.36"
            " 5.32 5.33 5.38 5.41 5.42 5.43 5.47 6.1 6.4 6.6 6.8 6.14 6.13 6.18 6.21 6.24 6.28 6.29 3.73 3.71 3.75 3.79"
            " 3.82 3.85 3.88 4.0 3.86 4.2 4.4 4.15 4.12 4.14 4.18 4.23 4.24 4.26 4.32 4.38 4.40 4.42 4.46 4.44 4.50"
            " 4.54 4.55 5.2 5.4 6.30 6.31 6.36 6.40 6.43 6.53 6.45 6.46 6.47 6.50 6.54 6.59 6.62 6.66 6.71 6.74 6.77"
            " 6.81 6.87 6.88 6.93 6.98 6.99 6.100 6.102",
            "pytest -n0 -rA --tb=no --no-header",
            "python -m pip install -r requirements/test.txt; python -m pip install -e hypothesis-python/;",
        ),
    ),
    "pydantic/pydantic": (
        GymCommands(
            "0.2 0.41 0.4 0.6 0.9 0.10 0.11 0.13 0.14 0.151 0.15 0.17 0.18 0.201 0.20 0.24 0.27 0.29 1.01 0.32 1.4 1.31"
            " 1.41 1.51 1.5 1.71 1.6 1.7 1.8 1.9 1.10 2.0 2.01 2.02 2.03 2.04 2.6 2.5 2.4 2.7",
            "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
            'export PATH="$HOME/.local/bin:$PATH"; pdm add pre-commit; make install;',
        ),
    ),
    "pandas-dev/pandas": (
        GymCommands(
            "0.16 0.17 0.18 0.19 0.20 0.21 0.22 0.23 0.24 0.25 0.26 1.0 1.1 1.2 1.3 1.4 1.5 2.0 2.1",
            "pytest -rA --tb=long",
            f"python -m pip install 'numpy<2'; {_PANDAS}",
        ),
        GymCommands("2.2 3.0", "pytest -rA --tb=long", _PANDAS),
    ),
    "facebookresearch/hydra": (
        GymCommands("0.1 0.9 0.10 0.11 0.12 1.0 1.1 1.2", "pytest -rA --tb=long", _HYDRA_OLD + _HYDRA),
        GymCommands("1.3 1.4", "pytest -rA --tb=long", _HYDRA),
    ),
}
