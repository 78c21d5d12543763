"""Prints a lock file without what another interpreter than this one would not install.

    python markers.py LOCK PYTHON_VERSION MACHINE

pip evaluates markers, such as python_full_version < '3.11.3', for the interpreter it runs on, even when it downloads
for another one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement


def wanted(lock: str, environment: dict[str, str]) -> list[str]:
    """The lock's requirements that hold in `environment`, with their hashes and without their markers."""
    found = []
    for line in lock.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            text, *hashes = line.split("--hash=")
            requirement = Requirement(text.strip())
            if requirement.marker is None or requirement.marker.evaluate(environment):
                requirement.marker = None
                found.append(" ".join([str(requirement), *(f"--hash={value.strip()}" for value in hashes)]))
    return found


def main(lock: str, python: str, machine: str) -> None:
    environment = {
        "implementation_name": "cpython",
        "implementation_version": python,
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": "linux",
    }
    print("\n".join(wanted(Path(lock).read_text(encoding="utf-8"), environment)))


if __name__ == "__main__":
    main(*sys.argv[1:])
