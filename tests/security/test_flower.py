"""Flower shows the tasks of all users: every page of the program that ships asks for the password, `/metrics` too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from flower.urls import handlers

from app.stack import flower
from app.stack.home import prepare, process_environment
from tests.services import MakeSettings, free_port
from tests.waiting import eventually

OPEN = {"/healthcheck", "/login/?", "/static/(.*)", "/logout", ".*"}
"""Say nothing of tasks: `OK`, the way in and out, Flower's own files, and 404 for every unknown address."""


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code > 0
    except httpx.TransportError:
        return False


@pytest.mark.timeout(120)
def test_every_page_asks_for_the_password(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(flower_port=free_port())
    prepare(settings)
    flower.prepare(settings)
    command = [sys.executable, "-m", "app.stack.flower_server", f"--conf={flower.configuration_file(settings)}"]
    environ = os.environ | process_environment(settings)
    log = tmp_path / "flower.log"
    with log.open("wb") as output, httpx.Client(base_url=flower.url(settings)) as client:
        program = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
        try:
            eventually(lambda: answers(client, "/healthcheck"), within_s=60)
            patterns = [getattr(one, "regex", None) or one[0] for one in handlers]
            paths = {getattr(one, "pattern", one).rstrip("$") for one in patterns} - OPEN
            assert {"/metrics", "/tasks", "/broker", "/api/tasks"} <= paths
            for path in sorted(paths):
                page = path.replace("(.+)", "x").replace("(.*)", "x")
                got = {client.get(page).status_code, client.post(page).status_code}
                assert got <= {401, 403, 405}, (page, got, log.read_text())
            auth = (settings.flower_user, flower.password(settings))
            assert client.get("/metrics", auth=(auth[0], "wrong")).status_code == 401
            assert "python_info" in client.get("/metrics", auth=auth).text
        finally:
            program.terminate()
            program.wait(30)
