"""Reads one service of a compose file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from app.compose_file.model import Bounds, Check, Condition, MountKind, Recipe, Service
from app.compose_file.mounts import Mounts
from app.compose_file.recipes import adapted
from app.compose_file.refusals import (
    BUILD_PASSED_OVER,
    BUILD_REFUSED,
    PASSED_OVER,
    REFUSED,
    refuse_host,
    refuse_listed,
    refuse_modes,
    refuse_sysctls,
)
from app.compose_file.values import Values, plain
from app.errors import SpecInvalid
from app.task_files import read_text_inside

_READ = {
    *("image", "build", "command", "entrypoint", "environment", "env_file", "working_dir", "user", "depends_on"),
    *("healthcheck", "expose", "ports", "volumes", "tmpfs", "networks", "network_mode", "hostname", "deploy"),
    *("mem_limit", "cpus", "pids_limit", "shm_size", "stop_signal", "init", "profiles", "extra_hosts", "security_opt"),
    *("cap_drop", "sysctls", "ulimits", "read_only", "ipc", "scale"),
}
_CHECK = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
_BUILD = {"context", "dockerfile", "args", "target", *BUILD_PASSED_OVER}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ULIMITS = {"cpu", "data", "fsize", "memlock", "msgqueue", "nofile", "nproc", "rss", "sigpending", "stack"}
_MAX_CHECK_S = 3600.0
_IN_IMAGE = "bring the files into its image, or leave `read_only` out"


class ServiceReader:
    """Reads services; `networks` are those that the file declares."""

    def __init__(self, values: Values, folder: Path, mounts: Mounts, networks: set[str]) -> None:
        self._values = values
        self._findings = values.findings
        self._folder = folder.resolve()
        self._mounts = mounts
        self._networks = networks

    def read(self, name: str, body: Any) -> Service:
        values, where = self._values, f"services.{name}"
        found = refuse_listed(self._findings, values.mapping(body, where), REFUSED, where)
        refuse_modes(self._findings, found, where)
        for key in found.keys() - _READ:
            if key in PASSED_OVER:
                self._findings.note(f"{where}.{key}", PASSED_OVER[key])
            else:
                self._findings.refuse(f"{where}.{key}", "a key that we know", found[key], "leave it out")
        image, recipe = values.text(found.get("image"), f"{where}.image"), self._recipe(found.get("build"), where)
        if image is None and recipe is None:
            self._findings.refuse(where, "`image` or `build`", list(found))
        sysctls = values.pairs(found.get("sysctls"), f"{where}.sysctls")
        refuse_sysctls(self._findings, sysctls, f"{where}.sysctls")
        deploy, mounts = self._deploy(found, where), self._mounts.read(found, where)
        read_only = values.flag(found.get("read_only"), f"{where}.read_only")
        copied = [one.target for one in mounts if one.kind in (MountKind.COPY, MountKind.FOLDER)]
        if read_only and copied:
            expected = "a root that can be written to, as files of the context are copied into it"
            self._findings.refuse(f"{where}.read_only", expected, f"it, and copies for {', '.join(copied)}", _IN_IMAGE)
        return Service(
            name=name,
            image=image,
            recipe=recipe,
            command=values.words(found.get("command"), f"{where}.command"),
            entrypoint=values.words(found.get("entrypoint"), f"{where}.entrypoint"),
            environment=self._environment(found, where),
            working_dir=values.text(found.get("working_dir"), f"{where}.working_dir"),
            user=values.text(found.get("user"), f"{where}.user"),
            hostname=values.text(found.get("hostname"), f"{where}.hostname"),
            depends_on=self._depends_on(found.get("depends_on"), f"{where}.depends_on"),
            check=self._check(found.get("healthcheck"), f"{where}.healthcheck"),
            mounts=mounts,
            networks=self._joined(found, where),
            hosts=self._hosts(found.get("extra_hosts"), f"{where}.extra_hosts"),
            exposed=self._exposed(found, where),
            bounds=self._bounds(found, deploy, where),
            shm_bytes=values.size_bytes(found.get("shm_size"), f"{where}.shm_size"),
            cap_drop=tuple(one.upper() for one in values.texts(found.get("cap_drop"), f"{where}.cap_drop")),
            sysctls=tuple((key, value or "") for key, value in sysctls.items()),
            ulimits=self._ulimits(found.get("ulimits"), f"{where}.ulimits"),
            read_only=read_only,
            init=values.flag(found.get("init"), f"{where}.init"),
            stop_signal=values.text(found.get("stop_signal"), f"{where}.stop_signal"),
            profiles=values.texts(found.get("profiles"), f"{where}.profiles"),
        )

    # --- Image ------------------------------------------------------------------------------------------------------

    def _recipe(self, build: Any, where: str) -> Recipe | None:
        if build is None:
            return None
        place = f"{where}.build"
        about = {"context": build} if isinstance(build, str) else self._values.mapping(build, place)
        about = refuse_listed(self._findings, about, BUILD_REFUSED, place)
        for key in about.keys() - _BUILD:
            self._findings.refuse(f"{place}.{key}", "a key that we know", about[key], "leave it out")
        context = self._values.text(about.get("context"), f"{place}.context") or "."
        dockerfile = self._values.text(about.get("dockerfile"), f"{place}.dockerfile") or "Dockerfile"
        folder = (self._folder / context).resolve()
        if "://" in context or not folder.is_relative_to(self._folder) or not folder.is_dir():
            self._findings.refuse(f"{place}.context", "a folder of the context", context, "copy it there")
            return None
        if not (folder / dockerfile).resolve().is_relative_to(folder) or not (folder / dockerfile).is_file():
            self._findings.refuse(f"{place}.dockerfile", "a file in the build's folder", dockerfile)
        args = self._values.pairs(about.get("args"), f"{place}.args")
        for key, value in args.items():
            if value and ("\n" in value or not _VARIABLE.fullmatch(key)):
                self._findings.refuse(f"{place}.args.{key}", "a name and a value of one line", value)
        given = tuple((key, value) for key, value in sorted(args.items()) if value is not None)
        target = self._values.text(about.get("target"), f"{place}.target")
        recipe = Recipe(str(folder.relative_to(self._folder)), dockerfile, given, target)
        self._refuse_unknown_stage(folder / dockerfile, recipe, place)
        return recipe

    def _refuse_unknown_stage(self, dockerfile: Path, recipe: Recipe, where: str) -> None:
        try:
            if recipe.target is not None and dockerfile.is_file():
                adapted(read_text_inside(self._folder, dockerfile, errors="replace"), recipe)
        except SpecInvalid as error:
            self._findings.refuse(f"{where}.target", "a stage of the Dockerfile", f"{recipe.target}: {error}")

    # --- What it starts with ----------------------------------------------------------------------------------------

    def _environment(self, found: dict[str, Any], where: str) -> tuple[tuple[str, str], ...]:
        """The files' variables, then the service's own; those without a value would be the host's: left out."""
        merged: dict[str, str | None] = {}
        listed = found.get("env_file")
        for one in listed if isinstance(listed, list) else [listed] if listed else []:
            merged |= self._env_file(one, f"{where}.env_file")
        merged |= self._values.pairs(found.get("environment"), f"{where}.environment")
        for key, value in merged.items():
            if not _VARIABLE.fullmatch(key):
                self._findings.refuse(f"{where}.environment", "names of variables", key)
            elif value is None:
                self._findings.note(f"{where}.environment.{key}", "left out: it would be taken from the host")
        return tuple((key, value) for key, value in merged.items() if value is not None)

    def _env_file(self, asked: Any, where: str) -> dict[str, str | None]:
        about = asked if isinstance(asked, dict) else {"path": asked}
        name = self._values.text(about.get("path"), where) or ""
        file = (self._folder / name).resolve()
        if not file.is_relative_to(self._folder) or not file.is_file():
            if about.get("required", True) or not file.is_relative_to(self._folder):
                self._findings.refuse(where, "a file of the context", name)
            return {}
        lines = (line.strip() for line in read_text_inside(self._folder, file, errors="replace").splitlines())
        pairs: dict[str, str | None] = {}
        for line in lines:
            if line and not line.startswith("#"):
                key, equals, value = line.removeprefix("export ").partition("=")
                pairs[key.strip()] = _unquoted(value.strip()) if equals else None
        return pairs

    def _depends_on(self, value: Any, where: str) -> tuple[tuple[str, Condition], ...]:
        if isinstance(value, list):
            return tuple((name, Condition.STARTED) for name in self._values.texts(value, where))
        needs = []
        for name, about in self._values.mapping(value, where).items():
            place = f"{where}.{name}"
            told = self._values.mapping(about, place)
            condition = str(told.get("condition", Condition.STARTED.value))
            if condition not in set(Condition) or told.keys() - {"condition", "restart", "required"}:
                self._findings.refuse(place, f"a condition of {', '.join(Condition)}", about)
            else:
                needs.append((name, Condition(condition)))
        return tuple(needs)

    def _check(self, value: Any, where: str) -> Check | None:
        if value is None:
            return None
        values, about = self._values, self._values.mapping(value, where)
        for key in about.keys() - _CHECK:
            self._findings.refuse(f"{where}.{key}", "a key of a health check", about[key])
        test = about.get("test")
        words = ("CMD-SHELL", test) if isinstance(test, str) else values.texts(test, f"{where}.test")
        disabled = values.flag(about.get("disable"), f"{where}.disable") or words[:1] == ("NONE",)
        if not disabled and words and (words[0] not in ("CMD", "CMD-SHELL") or len(words) < 2):
            self._findings.refuse(f"{where}.test", "CMD with words, CMD-SHELL with a command, or NONE", test)
        return Check(
            test=() if disabled else words,
            disabled=disabled,
            interval_s=min(_MAX_CHECK_S, values.seconds(about.get("interval"), f"{where}.interval", 30.0)) or 30.0,
            timeout_s=min(_MAX_CHECK_S, values.seconds(about.get("timeout"), f"{where}.timeout", 30.0)) or 30.0,
            start_period_s=values.seconds(about.get("start_period"), f"{where}.start_period", 0.0),
            retries=values.count(about.get("retries"), f"{where}.retries", 3) or 3,
        )

    # --- Network ----------------------------------------------------------------------------------------------------

    def _joined(self, found: dict[str, Any], where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
        place = f"{where}.networks"
        if found.get("network_mode") == "none":
            return ()
        asked = found.get("networks")
        named = {str(one): None for one in asked} if isinstance(asked, list) else self._values.mapping(asked, place)
        joined = []
        for network, about in named.items():
            told = self._values.mapping(about, f"{place}.{network}")
            if network not in self._networks | {"default"}:
                self._findings.refuse(f"{place}.{network}", "a network that the file's `networks` name", network)
            for key in told.keys() - {"aliases", "priority"}:
                self._findings.refuse(f"{place}.{network}.{key}", "aliases only", told[key], "leave it out")
            joined.append((network, self._values.texts(told.get("aliases"), f"{place}.{network}.aliases")))
        return tuple(joined) or (("default", ()),)

    def _hosts(self, value: Any, where: str) -> tuple[tuple[str, str], ...]:
        if isinstance(value, list):
            split = [re.split(r"[:=]", plain(one), maxsplit=1) for one in value]
            pairs = {parts[0]: parts[1] if len(parts) > 1 else "" for parts in split}
        else:
            pairs = {key: plain(one) for key, one in self._values.mapping(value, where).items()}
        for name, address in pairs.items():
            refuse_host(self._findings, name, address, where)
        return tuple(pairs.items())

    def _exposed(self, found: dict[str, Any], where: str) -> tuple[str, ...]:
        """Ports that a service has; none is published: everybody who may reach it is on its network."""
        ports: list[str] = list(self._values.texts(found.get("expose"), f"{where}.expose"))
        for one in self._values.items(found.get("ports"), f"{where}.ports"):
            told = plain(one.get("target", "")) if isinstance(one, dict) else plain(one).rpartition(":")[2]
            ports.append(told)
            self._findings.note(f"{where}.ports", f"{told} is reached by name on its network, not on the host")
        return tuple(ports)

    # --- Bounds -----------------------------------------------------------------------------------------------------

    def _deploy(self, found: dict[str, Any], where: str) -> dict[str, Any]:
        """`deploy.resources.limits`."""
        deploy = self._values.mapping(found.get("deploy"), f"{where}.deploy")
        for place, count in (("deploy.replicas", deploy.get("replicas")), ("scale", found.get("scale"))):
            if count not in (None, 1, "1"):
                self._findings.refuse(f"{where}.{place}", "one container of a service", count)
        resources = self._values.mapping(deploy.get("resources"), f"{where}.deploy.resources")
        reserved = self._values.mapping(resources.get("reservations"), f"{where}.deploy.resources.reservations")
        for asked, place in ((resources.get("limits"), "limits"), (reserved, "reservations")):
            if isinstance(asked, dict) and asked.get("devices"):
                expected, mend = REFUSED["devices"]
                self._findings.refuse(f"{where}.deploy.resources.{place}.devices", expected, asked["devices"], mend)
        return self._values.mapping(resources.get("limits"), f"{where}.deploy.resources.limits")

    def _bounds(self, found: dict[str, Any], limits: dict[str, Any], where: str) -> Bounds:
        """The tighter of what is said in either place."""
        values, place = self._values, f"{where}.deploy.resources.limits"
        cpus = [values.number(found.get("cpus"), f"{where}.cpus"), values.number(limits.get("cpus"), f"{place}.cpus")]
        memory = [
            values.size_bytes(found.get("mem_limit"), f"{where}.mem_limit"),
            values.size_bytes(limits.get("memory"), f"{place}.memory"),
        ]
        asked = found.get("pids_limit") if found.get("pids_limit") not in (-1, "-1") else None
        pids = [values.count(asked, f"{where}.pids_limit"), values.count(limits.get("pids"), f"{place}.pids")]
        return Bounds(
            min((one for one in cpus if one), default=None),
            min((one for one in memory if one), default=None),
            min((one for one in pids if one), default=None),
        )

    def _ulimits(self, value: Any, where: str) -> tuple[tuple[str, int, int], ...]:
        found = []
        for name, asked in self._values.mapping(value, where).items():
            if name == "core":
                self._findings.note(f"{where}.core", "no core is dumped: it would be written outside of the limits")
                continue
            told = asked if isinstance(asked, dict) else {"soft": asked, "hard": asked}
            try:
                soft, hard = int(plain(told["soft"])), int(plain(told["hard"]))
            except (KeyError, ValueError):
                name = f"{name}: {asked}"
            if name not in _ULIMITS:
                self._findings.refuse(where, f"numbers for one of {', '.join(sorted(_ULIMITS))}", name)
            else:
                found.append((name, soft, hard))
        return tuple(found)


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
