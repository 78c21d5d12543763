"""What a cloud's machine does at its first boot: it runs the worker image, which joins this installation once."""

from __future__ import annotations

import math
import re
import shlex

from app.errors import InstanceFailed
from app.ledger import hosts
from app.ledger.database import Database
from app.models.instance import InstanceRequest
from app.settings import Settings

_ECR = re.compile(r"(\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?)/")
_SOCKET, _HOME = "/var/run/docker.sock", "/var/lib/megaflow"


def boot_script(settings: Settings, request: InstanceRequest, token: str) -> str:
    """A shell script for the machine's user data. It holds no secret but `token`, which joins one worker, once.

    The machine needs a Docker engine, and the program `aws` where the worker image is in ECR. It powers itself off when
    the worker has left, and after the request's lifetime, whatever happens to us meanwhile.

    Raises: InstanceFailed: machines could not reach the web server at its URL.
    """
    image = settings.worker_image
    url = reachable(settings)
    join = ["megaflow", "worker", "join", url, "--token", token, "--instance", request.model_dump_json()]
    join += ["--plain-http"] if url.startswith("http:") else []  # the operator's word that nothing listens on the way
    run = ["docker", "run", "--rm", "--init", "--network", "host", "--pids-limit", "4096"]
    run += ["--volume", f"{_SOCKET}:{_SOCKET}", "--volume", f"{_HOME}:{_HOME}"]
    lines = ["#!/bin/sh", f"# An instance of the MegaFlow installation {settings.installation}."]
    if request.lifetime_s is not None:
        lines.append(f"shutdown -P +{max(1, math.ceil(request.lifetime_s / 60))}")
    lines += ["trap 'shutdown -P now' EXIT", f"cd / && mkdir -p {_HOME}"]
    lines.append("for again in $(seq 60); do docker info >/dev/null 2>&1 && break; sleep 1; done")
    if ecr := _ECR.match(image):
        host, region = ecr.groups()
        login = f"docker login --username AWS --password-stdin {host}"
        lines.append(f"aws ecr get-login-password --region {region} | {login}")
    lines.append(f"for again in 1 2 3; do docker pull --quiet {shlex.quote(image)} && break; sleep 5; done")
    lines.append(shlex.join([*run, image, *join]))
    return "\n".join(lines) + "\n"


def join_token(database: Database, settings: Settings, request: InstanceRequest) -> str:
    """With which one machine may join, once, as this instance, until it would have failed for not being ready.

    Raises: DatabaseUnavailable.
    """
    return hosts.invite(database, instance_id=request.instance_id, expires_s=settings.boot_timeout_s)


def reachable(settings: Settings) -> str:
    """The web server's URL as machines elsewhere know it. Raises: InstanceFailed: it is set to this machine's own."""
    url = settings.web_base()
    if settings.web_url is None:
        raise InstanceFailed(
            f"expected a URL at which machines reach the web server, found {url}, which no setting gives; "
            "set MEGAFLOW_WEB_URL, such as https://megaflow.example.org"
        )
    return url
