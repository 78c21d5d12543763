"""Environments without a daemon: an OCI runtime driven directly on unpacked images.

`available` says whether this host allows it, `OciProvider` makes the environments, `Records` and `end` are for who
cleans up after others. See README.md here.
"""

from __future__ import annotations

from app.environments.oci.body import end
from app.environments.oci.cgroups import remove_abandoned
from app.environments.oci.environment import OciEnvironment
from app.environments.oci.provider import OciProvider
from app.environments.oci.records import Record, Records
from app.environments.oci.trial import available

__all__ = ["OciEnvironment", "OciProvider", "Record", "Records", "available", "end", "remove_abandoned"]
