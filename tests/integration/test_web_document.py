"""The API against its own OpenAPI document, with generated requests."""

from __future__ import annotations

import json
import re
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    status_code_conformance,
)

from app.web.api.routes import OPERATIONS
from tests.integration.remote_fixture import Site, site
from tests.integration.test_reports import NIGHT, Reports, reports

__all__ = ["reports", "site"]

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


def _conforms(operation: APIOperation, token: str, examples: int) -> None:
    """Send so many generated requests; half of the paths and queries name what is there."""
    cases = operation.as_strategy()

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(case=cases, named=hypothesis.strategies.booleans())
    def conforms(case: schemathesis.Case, named: bool) -> None:
        if named:
            case.path_parameters |= {name: "night" for name in ("run",) if name in case.path_parameters}
            case.path_parameters |= {name: "click-1" for name in ("task",) if name in case.path_parameters}
        if operation.path.endswith("/events") and case.query is not None:
            case.query["follow"] = "false"  # else it goes on for ever
        if operation.path.endswith("/wait") and isinstance(case.body, dict):
            case.body["timeout_s"] = 0
        reply = case.call_and_validate(headers={"Authorization": f"Bearer {token}"}, checks=_CHECKS, timeout=60)
        _fits(operation, reply)

    conforms()


def _fits(operation: APIOperation, reply: Any) -> None:
    """The body has the schema that the document gives; of others than JSON there is none."""
    document = operation.schema.raw_schema
    described = document["paths"][operation.path][operation.method.lower()]["responses"]
    content = (described["200"] if reply.status_code == 200 else described["default"])["content"]
    if reply.headers["content-type"][0] == "application/json" and "application/json" in content:
        schema = {**content["application/json"].get("schema", {}), "components": document["components"]}
        Draft202012Validator(schema).validate(json.loads(reply.content))


@pytest.mark.parametrize("examples", [2, pytest.param(60, marks=[pytest.mark.extra, pytest.mark.timeout(1500)])])
def test_requests_of_every_operation_get_what_the_document_says(site: Site, reports: Reports, examples: int) -> None:
    reports.run("night", NIGHT)
    described = schemathesis.openapi.from_url(f"{site.url}/api/v1/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) == len(OPERATIONS)
    text = json.dumps(described.raw_schema)
    names = re.findall(r'"operationId": "([^"]+)"', text)
    assert len(names) == len(set(names)) == len(OPERATIONS)
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', text)) <= set(
        described.raw_schema["components"]["schemas"]
    )
    token = site.token("tester")
    for operation in operations:
        _conforms(operation, token, examples)
