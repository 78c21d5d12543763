"""`megaflow mcp` as an assistant meets it: the standard client, standard input and output, a real ledger."""

from __future__ import annotations

import json
import os
import sys

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

from app.ledger import accept
from app.ledger.accept import NewRun
from app.ledger.database import Database
from app.ledger.users import Scope
from app.settings import Settings
from tests.building import a_spec
from tests.integration.remote_fixture import NOWHERE, Site, site
from tests.integration.test_reports import NIGHT, Reports, reports

__all__ = ["reports", "site"]

READ_ONLY = {"list_runs", "run_status", "list_tasks", "show_task", "explain_run", "report_run"}


@pytest.fixture
def parameters(settings: Settings, database: Database) -> StdioServerParameters:
    variables = {
        "MEGAFLOW_HOME": str(settings.home),
        "MEGAFLOW_DATABASE_URL": database.url,
        "MEGAFLOW_ARTIFACTS_URL": settings.artifacts(),
    }
    command = ["-c", "from app.cli import main; main()", "mcp"]
    return StdioServerParameters(command=sys.executable, args=command, env={**os.environ, **variables})


def test_an_assistant_sees_metadata_and_no_text_of_agents(parameters: StdioServerParameters, reports: Reports) -> None:
    run_id = reports.run("night", NIGHT)

    async def ask() -> None:
        async with Client(stdio_client(parameters)) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == READ_ONLY
            assert client.server_info is not None
            assert client.server_info.version
            runs = await _answer(client, "list_runs")
            assert (runs[0]["name"], runs[0]["scored"]) == ("night", 4)
            tasks = await _answer(client, "list_tasks", run="night")
            assert len(tasks) == 5
            lost = next(one for one in tasks if one["name"] == "click-5")
            assert lost["attempts"][0]["failure"] == "ImageUnavailable"
            assert "no image 17" not in json.dumps(tasks)
            report = await _answer(client, "report_run", run=str(run_id))
            assert report["headline"]["solved"] == 2
            unknown = await client.call_tool("run_status", {"run": "nothing"})
            assert unknown.is_error

    anyio.run(ask)


def test_content_is_read_when_asked_for(parameters: StdioServerParameters, reports: Reports) -> None:
    attempt = reports.attempt(reports.run("night", NIGHT))
    parameters.args.append("--content")

    async def ask() -> None:
        async with Client(stdio_client(parameters)) as client:
            found = await client.call_tool("read_artifact", {"attempt_id": str(attempt.id), "kind": "patch"})
            assert "+++ b/x" in found.content[0].text

    anyio.run(ask)


def test_over_a_server_an_assistant_sees_what_the_token_may(site: Site, reports: Reports) -> None:
    night = reports.run("night", NIGHT)
    hers = accept.accept(site.database, NewRun(specs=[a_spec("hers")], user_name="alice"))
    variables = {"MEGAFLOW_HOME": str(site.settings.home), "MEGAFLOW_DATABASE_URL": NOWHERE}
    command = ["-m", "megaflow", "--server", site.url, "mcp"]

    async def ask(token: str) -> tuple[str, bool]:
        """The ids of the runs that the token's user has, and whether another user's run is refused to it."""
        environment = {**os.environ, **variables, "MEGAFLOW_TOKEN": token}
        asked = StdioServerParameters(command=sys.executable, args=command, env=environment)
        async with Client(stdio_client(asked)) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == READ_ONLY
            found = await client.call_tool("run_status", {"run": str(night)})
            runs = (await client.call_tool("list_runs", {})).content
            return "".join(one.text for one in runs), bool(found.is_error)

    text, refused = anyio.run(ask, site.token())
    assert (str(night) in text, str(hers.run_id) in text, refused) == (True, True, False)
    text, refused = anyio.run(ask, site.token("alice", Scope.READ))
    assert (str(night) in text, str(hers.run_id) in text, refused) == (False, True, True)


async def _answer(client: Client, tool: str, **arguments: object) -> object:
    found = await client.call_tool(tool, arguments)
    assert not found.is_error, found.content
    return found.structured_content.get("result", found.structured_content)
