"""Reads task folders in the Harbor format (Terminal-Bench 2): one folder, or a folder of them.

A task is task.toml, instruction.md, environment/ (a Dockerfile, a prebuilt image named in task.toml, or a compose file
with several services), tests/test.sh and solution/solve.sh. Unsupported features are refused, not ignored.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from app.compose_file.file import document, read_project
from app.compose_file.model import Service
from app.datasets.base import DatasetFormat, Reading
from app.datasets.faults import FaultPlace, expected
from app.datasets.harbor_toml import TaskEnvironment, TaskToml, read_config
from app.datasets.policies import KEY, Policies
from app.errors import DatasetInvalid
from app.models.spec import (
    AgentTask,
    Build,
    Compose,
    EnvironmentSpec,
    Limits,
    Network,
    Resources,
    ScriptGoal,
    ScriptSolution,
    ServiceScript,
)
from app.task_files import inside, read_inside, read_text_inside

_START_S = 300.0  # to start the container, added to the image's build timeout
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_MAIN = "main"
"""Service in which the agent acts."""
_SIZES = {"memory_bytes": ("memory_mb", "memory"), "disk_bytes": ("storage_mb", "storage")}
"""Keys for each size; the first one present is used."""
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _task_folders(path: Path) -> list[Path]:
    if (path / "task.toml").is_file():
        return [path]
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    tasks = [folder for folder in folders if (folder / "task.toml").is_file()]
    for folder in folders if tasks else []:
        if (folder / "instruction.md").is_file() and folder not in tasks:
            raise DatasetInvalid(f"{folder}: expected task.toml beside instruction.md; found none")
    return tasks


def _task(folder: Path, dataset: Path, reading: Reading) -> AgentTask:
    place = FaultPlace(str(folder / "task.toml"))
    with place.named():
        config = read_config(folder, place, strict=reading.strict)
        return AgentTask(
            name=os.path.basename(os.path.abspath(folder)),  # a link's own name
            dataset=dataset.resolve().name,
            description=_instruction(folder),
            environment=_environment(folder, config, reading, place),
            goal=_goal(folder, config, reading, place),
            solution=_solution(folder, config, reading, place),
            limits=_limits(config),
        )


def _instruction(folder: Path) -> str:
    file = folder / "instruction.md"
    try:
        text = read_text_inside(folder, file)
    except OSError as error:
        raise DatasetInvalid(f"{file}: expected the task's instruction; found {error}") from error
    if not text.strip():
        raise DatasetInvalid(f"{file}: expected the task's instruction; found an empty file")
    return text


def _environment(folder: Path, config: TaskToml, reading: Reading, place: FaultPlace) -> EnvironmentSpec:
    section, policies, context = config.environment, config.megaflow, inside(folder, folder / "environment")
    dockerfile, build = context / "Dockerfile", None
    compose = None
    if (file := compose_file(context)) is not None:
        compose, dockerfile, workdir = _several(context, file, section, reading)
        section = section.model_copy(update={"workdir": section.workdir or workdir})
    elif section.docker_image is None:
        if not dockerfile.is_file():
            raise place.fault("environment.docker_image", "an image, or environment/Dockerfile", None)
        build = Build(context=reading.pack(context), timeout_s=section.build_timeout_sec)
    return EnvironmentSpec(
        kind=reading.kind,
        image=section.docker_image if compose is None else None,
        build=build,
        compose=compose,
        workdir=section.workdir or image_workdir(folder, dockerfile, place),
        resources=_resources(section, "environment", place),
        network=_network(section, policies, place),
        allowed_hosts=section.allowed_hosts,
        setup=policies.setup,
        reuse=policies.reuse,
        env=_literal(section.env, "environment.env", place),
    )


def compose_file(folder: Path) -> str | None:
    """Returns the name of the folder's compose file, if it has one."""
    return next((name for name in _COMPOSE if (folder / name).exists()), None)


def _several(context: Path, file: str, asked: TaskEnvironment, reading: Reading) -> tuple[Compose, Path, str | None]:
    """Returns the folder with its compose file, the path of the main image's Dockerfile, and the file's working folder.

    Harbor merges the task's file over its own, which gives the service `main` its image if the task does not.

    Raises: SpecInvalid: names everything that the file must not request.
    """
    tree = document(context, context / file)
    services = tree["services"]
    main = services.get(_MAIN) or {}
    if isinstance(main, dict) and (asked.docker_image or not main.keys() & {"image", "build"}):
        own = {"image": asked.docker_image} if asked.docker_image else {"build": {"context": "."}}
        services[_MAIN] = {key: value for key, value in main.items() if key not in ("image", "build")} | own
    with tempfile.TemporaryDirectory(prefix="megaflow-dataset-") as scratch:
        copy = Path(shutil.copytree(context, Path(scratch) / "environment", symlinks=True))
        (copy / file).unlink()  # it may be a link, which must not be followed
        (copy / file).write_text(_written(tree), encoding="utf-8")
        service = read_project(copy, file, _MAIN).services[_MAIN]
        return Compose(context=reading.pack(copy), file=file), recipe_of(context, service), service.working_dir


def recipe_of(context: Path, service: Service) -> Path:
    """Returns the path of a service's Dockerfile; a path that does not exist if it has none."""
    if service.build is None:
        return context / "no Dockerfile"
    return context / service.build.context / service.build.dockerfile


def _written(tree: dict[str, Any]) -> str:
    import yaml  # only tasks of several containers need it

    return str(yaml.safe_dump(tree, sort_keys=False))


def image_workdir(folder: Path, dockerfile: Path, place: FaultPlace) -> str:
    """Returns the folder of the image's last WORKDIR; /app if it has none. folder: of the task."""
    workdir = PurePosixPath("/")
    text = read_text_inside(folder, dockerfile) if dockerfile.is_file() else ""
    named = re.findall(r"^\s*(FROM|WORKDIR)\s+(.+?)\s*$", text, flags=re.MULTILINE | re.IGNORECASE)
    for word, argument in named:
        # A new stage starts at the root, or in its base image's folder, which is unknown here.
        workdir = PurePosixPath("/") if word.upper() == "FROM" else workdir / argument.strip("\"'")
    if "$" in str(workdir):
        raise place.fault("environment.workdir", "a folder, as the Dockerfile's WORKDIR holds a variable", None)
    return str(workdir) if workdir != PurePosixPath("/") else "/app"


def _resources(asked: TaskEnvironment, section: str, place: FaultPlace) -> Resources:
    """Raises: DatasetInvalid: names the key of the file's `section` as it is written there."""
    try:
        return Resources(cpus=asked.cpus, memory_bytes=_memory_bytes(asked), disk_bytes=_disk_bytes(asked))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        if field in _SIZES:
            key = next(name for name in _SIZES[field] if getattr(asked, name) is not None)
            limits, words_by_bound = first["ctx"], {"ge": "at least", "le": "at most"}
            requirement = next(
                f"{words} {limits[word] >> 20} MiB" for word, words in words_by_bound.items() if word in limits
            )
        else:
            key, requirement = field, expected(first)
        raise place.fault(f"{section}.{key}", requirement, getattr(asked, key)) from error


def _memory_bytes(asked: TaskEnvironment) -> int:
    if asked.memory_mb is not None or asked.memory is None:
        return (asked.memory_mb or 2048) << 20
    return _bytes(asked.memory)


def _disk_bytes(asked: TaskEnvironment) -> int | None:
    """Returns the task's disk size; None: the task does not set one and gets the default."""
    if asked.storage_mb is not None:
        return asked.storage_mb << 20
    return None if asked.storage is None else _bytes(asked.storage)


def _bytes(size: str) -> int:
    return int(float(size[:-1]) * _UNITS[size[-1].upper()])


def _network(asked: TaskEnvironment, ours: Policies, place: FaultPlace) -> Network:
    """Returns the format's network: open unless the task closes it or lists hosts; `model-only` is our own value."""
    if asked.allowed_hosts and asked.network_mode not in (None, "allowlist"):
        expected = "`allowlist`, or nothing, where there are allowed_hosts"
        raise place.fault("environment.network_mode", expected, asked.network_mode)
    mode = asked.network_mode or ("allowlist" if asked.allowed_hosts else None)
    if ours.network is not None:
        _refuse_two_networks(asked, mode, ours.network, place)
        return ours.network
    if mode == "allowlist":
        return Network.ALLOWLIST if asked.allowed_hosts else Network.NONE  # an empty list
    if mode is not None:
        return Network.OPEN if mode == "public" else Network.NONE
    return Network.OPEN if asked.allow_internet else Network.NONE


def _refuse_two_networks(asked: TaskEnvironment, mode: str | None, ours: Network, place: FaultPlace) -> None:
    """Refuses ours unless it is `model-only`, which the format lacks, and the format's own settings open no network."""
    if ours is not Network.MODEL_ONLY:
        fix = "write the others as [environment].network_mode and allowed_hosts"
        raise place.fault(f"{KEY}.network", "'model-only'", ours.value, fix)
    open_by_word = asked.allow_internet and "allow_internet" in asked.model_fields_set and mode is None
    if open_by_word or mode not in (None, "no-network"):
        other = mode or "allow_internet = true"
        raise place.fault(f"{KEY}.network", f"no other network beside {ours.value!r}", other)


def _goal(folder: Path, config: TaskToml, reading: Reading, place: FaultPlace) -> ScriptGoal:
    env = _literal(config.verifier.env, "verifier.env", place)
    judges = [
        (service, f'{_exports(env)}bash "${{TESTS_DIR:-/tests}}/{script}"')
        for service, script in _judges(folder, config.verifier.service, place, strict=reading.strict)
    ]
    (service, command), *others = judges
    if (apart := _verifier_apart(folder, config, reading, place)) is not None:
        spec, brings_tests = apart
        return ScriptGoal(
            tests=reading.pack(inside(folder, folder / "tests")),
            command=command,
            environment=spec,
            artifacts=_artifacts(config, place),
            brings_tests=brings_tests,
            reward_range=config.megaflow.reward_range,
        )
    return ScriptGoal(
        tests=reading.pack(inside(folder, folder / "tests")),
        command=command,
        tests_path="/tests",
        logs_path="/logs",
        service=service,
        also=tuple(ServiceScript(service=name or _MAIN, command=command) for name, command in others),
        reward_range=config.megaflow.reward_range,
    )


def _verifier_apart(
    folder: Path, config: TaskToml, reading: Reading, place: FaultPlace
) -> tuple[EnvironmentSpec, bool] | None:
    """Returns the verifier's own environment and whether its image has the tests; None: it runs where the agent worked.

    Source: harbor 0.25.0, models/task/verifier_mode.py: its own environment means `separate`; the image is the one
    named there, else tests/Dockerfile, else a fresh copy of the task's, with all its containers.
    """
    verifier, tests, own = config.verifier, folder / "tests", config.environment
    if verifier.environment_mode == "shared" and verifier.environment is not None:
        raise place.fault("verifier.environment_mode", "'separate' beside [verifier.environment]", "shared")
    if verifier.environment_mode != "separate" and verifier.environment is None:
        return None
    if (beside := compose_file(inside(folder, tests))) or verifier.service is not None:
        expected = "'shared', or a verifier in one container (an image, or tests/Dockerfile) and no service"
        raise place.fault("verifier.environment_mode", expected, beside or f"service {verifier.service!r}")
    settings, section = verifier.environment or own, "verifier.environment" if verifier.environment else "environment"
    if verifier.environment is not None and settings.docker_image:
        return _one_container(folder / "tests", settings, section, None, reading, place), True
    if (tests / "Dockerfile").is_file():
        settings = settings.model_copy(update={"docker_image": None})
        return _one_container(folder / "tests", settings, section, inside(folder, tests), reading, place), True
    if file := compose_file(inside(folder, folder / "environment")):
        if verifier.environment is not None:
            raise place.fault(
                "verifier.environment.docker_image", f"an image, or tests/Dockerfile, beside {file}", None
            )
        return _environment(folder, config, reading, place), False
    settings = settings.model_copy(
        update={"docker_image": own.docker_image, "workdir": settings.workdir or own.workdir}
    )
    context = None if own.docker_image else inside(folder, folder / "environment")
    return _one_container(folder / "environment", settings, section, context, reading, place), False


def _one_container(
    home: Path, asked: TaskEnvironment, section: str, context: Path | None, reading: Reading, place: FaultPlace
) -> EnvironmentSpec:
    """Returns an environment. section: name of the file's section `asked`. context: folder to build; None: an image."""
    build = None if context is None else Build(context=reading.pack(context), timeout_s=asked.build_timeout_sec)
    return EnvironmentSpec(
        kind=reading.kind,
        image=None if build else asked.docker_image,
        build=build,
        workdir=asked.workdir or image_workdir(home.parent, home / "Dockerfile", place),
        resources=_resources(asked, section, place),
        network=_network(asked, Policies(), place),
        allowed_hosts=asked.allowed_hosts,
        env=_literal(asked.env, "verifier.environment.env", place),
    )


def _artifacts(config: TaskToml, place: FaultPlace) -> tuple[str, ...]:
    """Returns absolute paths inside; the format's fixed path comes first."""
    sources = [one if isinstance(one, str) else one.source for one in config.artifacts]
    for source in sources:
        if not source.startswith("/") or ".." in PurePosixPath(source).parts:
            raise place.fault("artifacts", "absolute paths without `..`", source)
    return tuple(dict.fromkeys(["/logs/artifacts", *sources]))


def _judges(
    folder: Path, asked: str | tuple[str, ...] | None, place: FaultPlace, *, strict: bool
) -> list[tuple[str | None, str]]:
    """Returns the services that run the tests (None: where the agent acts), each with its script in `tests`."""
    tests = inside(folder, folder / "tests")
    if asked is None or isinstance(asked, str):
        service = None if asked is None else _known(folder / "environment", asked, place)
        return [(None if service == _MAIN else service, _script(tests, "test.sh", strict=strict))]
    if not asked or len(set(asked)) < len(asked):
        raise place.fault("verifier.service", "the name of a service, or several, each once", list(asked))
    names = [_known(folder / "environment", name, place) for name in asked]
    return [(name, _script(tests, f"{name}/test.sh", "test.sh", strict=strict)) for name in names]


def _script(tests: Path, *choices: str, strict: bool) -> str:
    for name in choices:
        if (tests / name).is_file():
            if strict:
                _check_script(tests, tests / name)
            return name
    expected = " or ".join(str(tests / name) for name in choices)
    raise DatasetInvalid(f"{expected}: expected the script that judges; found none")


def _check_script(folder: Path, file: Path) -> None:
    """Raises: DatasetInvalid: bash would do nothing, or read the CR at line ends as part of its words."""
    content = read_inside(folder, file)
    if not content.strip():
        raise DatasetInvalid(f"{file}: expected commands; found an empty file")
    line = next((n for n, text in enumerate(content.split(b"\n"), 1) if text.endswith(b"\r")), None)
    if line is not None:
        raise DatasetInvalid(f"{file}: expected lines that end with LF alone; found CR LF at the end of line {line}")


def _known(context: Path, service: str, place: FaultPlace) -> str:
    file = compose_file(context)
    known = sorted({_MAIN, *document(context, context / file)["services"]}) if file is not None else []
    if service not in known:
        fix = f"known: {', '.join(known) or 'none, without a compose file'}"
        raise place.fault("verifier.service", "a service of the compose file", service, fix)
    return service


def _solution(folder: Path, config: TaskToml, reading: Reading, place: FaultPlace) -> ScriptSolution | None:
    if not inside(folder, folder / "solution" / "solve.sh").is_file():
        return None  # then only `oracle` cannot run
    if reading.strict:
        _check_script(folder, folder / "solution" / "solve.sh")
    env = _literal(config.solution.env, "solution.env", place)
    return ScriptSolution(
        files=reading.pack(inside(folder, folder / "solution")),
        command=f'{_exports(env)}bash "${{SOLUTION_DIR:-/solution}}/solve.sh"',
        path="/solution",
    )


def _literal(env: dict[str, str], field: str, place: FaultPlace) -> dict[str, str]:
    """Refuses templates: they read secrets from the host, and values in a spec are stored and shown."""
    for name, value in env.items():
        if "${" in value:
            raise place.fault(f"{field}.{name}", "a plain value; those of the host are not handed on", value)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise place.fault(field, "names of environment variables", name)
    return env


def _exports(env: dict[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}; " for name, value in sorted(env.items()))


def _limits(config: TaskToml) -> Limits:
    plain = Limits()
    return Limits(
        environment_timeout_s=config.environment.build_timeout_sec + _START_S,
        agent_timeout_s=config.agent.timeout_sec or plain.agent_timeout_s,
        grading_timeout_s=config.verifier.timeout_sec or 600.0,
    )


HARBOR = DatasetFormat("harbor", _task_folders, _task)
