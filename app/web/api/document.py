"""Makes the OpenAPI document from the operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from app.web.api.operation import PREFIX, Operation

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}


def document(operations: Iterable[Operation], version: str) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of these operations."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": _ERROR}
    for one in operations:
        path = PREFIX + re.sub(r":\w+\}", "}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _described(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "MegaFlow", "version": version},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
        "paths": paths,
    }


def _described(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {}}
    if one.media_type == "application/json":
        content = {"schema": _schema(one.replies, "serialization", schemas)}
    responses: dict[str, Any] = {"200": {"description": one.summary, "content": {one.media_type: content}}}
    if one.media_type == "application/octet-stream":
        described: dict[str, Any] = {"text/plain": {}, "application/json": {}, "application/octet-stream": {}}
        described |= {"application/x-tar": {}}
        responses["200"]["content"] = described
        responses["206"] = {"description": "A range of the bytes.", "content": described}
    responses["default"] = {
        "description": "What was expected, what was found, what to try.",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    }
    entry: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "description": f"Needs the scope `{one.scope.value}`."
        if one.scope
        else "Needs a secret that was given for this.",
        "parameters": [*_in_path(one), *_in_query(one, schemas)],
        "responses": responses,
    }
    if one.body is not None:
        body = _schema(one.bodies[-1], "validation", schemas)
        entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return entry


def _in_path(one: Operation) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in one.parameters]


def _in_query(one: Operation, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    if one.query is None:
        return []
    query_schema = one.query.model_json_schema(ref_template=_REF)
    schemas.update(query_schema.pop("$defs", {}))
    required = set(query_schema.get("required", ()))
    return [
        {"name": name, "in": "query", "required": name in required, "schema": schema}
        for name, schema in query_schema.get("properties", {}).items()
    ]


def _schema(adapter: TypeAdapter[Any], mode: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a type; adds the schemas that it uses to `schemas`."""
    schema = adapter.json_schema(mode=mode, ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    return schema
