"""Lists the refused and the ignored keys of compose files, and collects refusals with their place in the file.

Keys that are neither in a table nor in a model are refused, too: an unknown key may mean anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from app.errors import SpecInvalid

_OMIT = "leave it out"
_SHARES_NOTHING = "let the service do without it; a task's containers share nothing with their host"
_AS_MOUNT = ("a read-only mount of a file in the context", "write it as `./file:/path:ro` under volumes")
_NO_OPTIONS = ("none of the engine's options", _OMIT)
_SHOWN_CHARACTERS = 100
_MOST_TOLD = 100

Refusal = tuple[str, str]
"""Expected content, and advice on what to try."""

REFUSED: Mapping[str, Mapping[str, Refusal]] = {
    "file": {
        "include": ("one file", "write the services here"),
        "configs": _AS_MOUNT,
        "secrets": _AS_MOUNT,
        "models": ("no model of the engine", _OMIT),
    },
    "service": {
        # the host's own
        "privileged": ("no privileges", _SHARES_NOTHING),
        "cap_add": (
            "no added capabilities",
            "those of the engine's default set that packages and tests need are there",
        ),
        **dict.fromkeys(("devices", "device_cgroup_rules", "gpus"), ("no devices of the host", _SHARES_NOTHING)),
        "userns_mode": ("the engine's own user namespace", _OMIT),
        "uts": ("a host name of its own", _OMIT),
        "pid": ("a process table of its own", _OMIT),
        "cgroup": ("a control group of its own", _OMIT),
        "cgroup_parent": ("limits of the task", _OMIT),
        "runtime": ("the engine's own runtime", _OMIT),
        "isolation": ("the engine's own isolation", _OMIT),
        "credential_spec": ("no credentials of the host", _OMIT),
        "use_api_socket": ("no socket of the engine", _SHARES_NOTHING),
        "oom_kill_disable": ("a limit of memory that holds", _OMIT),
        "mac_address": ("an address that the engine gives", _OMIT),
        # other files and containers
        "extends": ("a service that is whole in this file", "write its keys here"),
        "external_links": ("services of this file only", _OMIT),
        "volumes_from": ("volumes by name", "name a volume in both services"),
        "volume_driver": ("the engine's own volumes", _OMIT),
        "configs": _AS_MOUNT,
        "secrets": _AS_MOUNT,
        "models": ("no model of the engine", _OMIT),
        "provider": ("a container", _OMIT),
        # not supported
        **dict.fromkeys(("dns", "dns_opt", "dns_search"), ("the project's own names", _OMIT)),
        "domainname": ("a bare host name", _OMIT),
        "group_add": ("the user's own groups", "set them up in the image"),
        "links": ("services that see each other by name", "use depends_on"),
        **dict.fromkeys(("post_start", "pre_start"), ("no hooks", "do it in the service's command")),
        "pre_stop": ("no hooks", _OMIT),
        "storage_opt": ("the task's own limits", _OMIT),
        "sysctls": ("the engine's own settings", "set what the service needs in its own configuration"),
        "read_only": ("a root that can be written to", _OMIT),
    },
    "build": {
        **dict.fromkeys(("privileged", "entitlements"), ("no privileges", _OMIT)),
        "network": ("the engine's own network for builds", _OMIT),
        "ssh": ("no keys of the host", _OMIT),
        "secrets": ("no secrets of the host", _OMIT),
        "isolation": ("the engine's own isolation", _OMIT),
        "extra_hosts": ("no further hosts", _OMIT),
        "additional_contexts": ("one context", "copy what is needed into it"),
        "dockerfile_inline": ("a Dockerfile in the context", "write it as a file"),
        "ulimits": ("the engine's own limits for builds", _OMIT),
    },
    "network": {
        "external": ("one of the project's own", _OMIT),
        **dict.fromkeys(("driver_opts", "ipam"), _NO_OPTIONS),
    },
    "volume": {"external": ("one of the project's own", _OMIT), "driver_opts": _NO_OPTIONS},
}
"""Keys by section, refused unless they are empty or false."""

IGNORED: Mapping[str, Mapping[str, str]] = {
    "service": {
        "restart": "a service that ends is a finding, not started again",
        "container_name": "containers get names of their own",
        **dict.fromkeys(("labels", "label_file", "annotations"), "objects carry our labels"),
        **dict.fromkeys(("logging", "attach"), "logs are kept with the attempt"),
        "pull_policy": "an image is pulled when it is not here",
        **dict.fromkeys(("stop_grace_period", "stop_signal"), "containers are ended at once"),
        "ulimits": "those of every container hold",
        "stdin_open": "no input is sent",
        "tty": "no terminal is attached",
        "develop": "for development only",
        "platform": "the engine's own is used, an image for another is refused",
        **dict.fromkeys(("memswap_limit", "mem_swappiness"), "swap is not added"),
        "mem_reservation": "nothing is reserved",
        **dict.fromkeys(("cpu_shares", "cpu_count", "cpu_percent", "cpu_period", "cpu_quota"), "cpus bounds it"),
        **dict.fromkeys(("cpu_rt_period", "cpu_rt_runtime", "cpuset"), "cpus bounds it"),
        "blkio_config": "not bounded",
        "oom_score_adj": "the task's own holds",
    },
    "build": {
        **dict.fromkeys(("cache_from", "cache_to", "no_cache", "no_cache_filter", "pull"), ""),
        **dict.fromkeys(("labels", "platforms", "provenance", "sbom", "shm_size", "tags"), ""),
    },
}
"""Keys by section that change nothing visible to a task, with the text of a note (empty: no note)."""

_TYPES: Mapping[str, Refusal] = {
    "extra_forbidden": ("a key that we know", _OMIT),
    "model_type": ("a map", ""),
    "dict_type": ("a map", ""),
    "tuple_type": ("a list", ""),
}
"""Expected content and advice, by pydantic's own type of error."""


@dataclass(frozen=True, slots=True)
class FileContext:
    """Facts about a file for its validators, and their reports. `where`: the current section, e.g. services.main."""

    folder: Path
    where: str = ""
    volumes: frozenset[str] = frozenset()  # declared in the file
    networks: frozenset[str] = frozenset()
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(info: ValidationInfo) -> FileContext:
        assert isinstance(info.context, FileContext)
        return info.context

    def refuse(self, key: str, expected: str, found: object, advice: str = "") -> None:
        if len(self.errors) < _MOST_TOLD:
            self.errors.append(f"{self._place(key)}: {_message(expected, found, advice)}")

    def note(self, key: str, text: str) -> None:
        if len(self.notes) < _MOST_TOLD:
            self.notes.append(f"{self._place(key)}: {text}")

    def _place(self, key: str) -> str:
        return f"{self.where}.{key}".strip(".")

    def add(self, error: ValidationError) -> set[object]:
        """Adds all errors of this section. Returns the keys of the section that they are about."""
        for one in error.errors(include_url=False):
            key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"]).lstrip(".")
            if one["type"] == "refused":
                self.errors.append(f"{self._place(key)}: {one['msg']}")
            else:
                expected, advice = _TYPES.get(one["type"], (one["msg"], ""))
                self.refuse(key, expected, one["input"], advice)
        return {one["loc"][0] for one in error.errors(include_url=False) if one["loc"]}

    def refuse_listed(self, section: str, body: dict[str, Any], at: str) -> dict[str, Any]:
        """Refuses or notes the keys that the tables list for this section at `at`. Returns the other keys."""
        refusals, ignored = REFUSED.get(section, {}), IGNORED.get(section, {})
        for key, value in body.items():
            if key in refusals and value not in (None, False, "", "false", [], {}):
                expected, advice = refusals[key]
                self.refuse(f"{at}.{key}".strip("."), expected, value, advice)
            elif ignored.get(key):
                self.note(key, ignored[key])
        listed = refusals.keys() | ignored.keys()
        return {key: value for key, value in body.items() if key not in listed and not key.startswith("x-")}

    def raise_refused(self, file: str) -> None:
        """Raises: SpecInvalid: something was refused; it names every such place."""
        if self.errors:
            lines = "".join(f"\n- {line}" for line in dict.fromkeys(self.errors))
            raise SpecInvalid(f"{file} is refused for what it asks in {len(set(self.errors))} place(s):{lines}")


def refused(expected: str, found: object, advice: str = "") -> PydanticCustomError:
    """Creates an error for a validator to raise; pydantic adds the place."""
    return PydanticCustomError("refused", "{message}", {"message": _message(expected, found, advice)})


def _message(expected: str, found: object, advice: str) -> str:
    text = "nothing" if found is None else repr(found[: 2 * _SHOWN_CHARACTERS] if isinstance(found, str) else found)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return f"expected {expected}; found {shown}{f'; {advice}' if advice else ''}"
