"""Environments without a daemon: an OCI runtime driven directly on unpacked images.

`available` tells why this host cannot run them, `OciProvider` makes the environments, `Records` and `end` are for code
that removes abandoned ones. See README.md here.
"""

from __future__ import annotations

from app.environments.runtimes.oci.environment import OciEnvironment
from app.environments.runtimes.oci.instance import end
from app.environments.runtimes.oci.probe import available
from app.environments.runtimes.oci.provider import OciProvider
from app.host.cgroups import remove_abandoned
from app.host.environment_records import Record, Records

__all__ = ["OciEnvironment", "OciProvider", "Record", "Records", "available", "end", "remove_abandoned"]
