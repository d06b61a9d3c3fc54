"""The reference of the HTTP interfaces, from the OpenAPI documents that the agent and the gateway serve."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from typing import Any

import httpx

from rankmesh_agent.http.app import create_app as create_agent
from rankmesh_gateway.http.app import create_app as create_gateway

Json = dict[str, Any]


def document(create: Any, **options: Any) -> Json:
    """Return the OpenAPI document of an application, as it serves it."""
    token = secrets.token_hex()

    async def get() -> Json:
        transport = httpx.ASGITransport(create(token=token, **options))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.get("/openapi.json", headers={"Authorization": f"Bearer {token}"})
            response.raise_for_status()
            found: Json = response.json()
            return found

    return asyncio.run(get())


def page() -> str:
    """Return the page of the endpoints of an agent and of the gateway."""
    head = (
        "# HTTP reference\n\nOn this page you find each endpoint of agents and of the gateway, with its statuses and "
        "documents. It is made from `/openapi.json`, which each service serves. [HTTP and curl](../http.md) is a tour."
    )
    agent, gateway = document(create_agent, agent=None, leases=object()), document(create_gateway)
    return "\n\n".join([head, *service(agent, "agent"), *service(gateway, "gateway")])


def service(openapi: Json, name: str) -> list[str]:
    """Return the sections of an OpenAPI document, whose anchors begin with the name of the service."""
    text = json.dumps(openapi).replace("#/components/schemas/", f"#/components/schemas/{name}-")
    openapi = json.loads(text)
    schemas = openapi["components"]["schemas"]
    sections: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation.get("tags") or ["other"]
            sections.setdefault(tag, []).append("\n\n".join(operation_parts(path, method, operation)))
    parts = [f"## The {name}", openapi["info"]["description"]]
    for tag, operations in sections.items():
        parts += [f"### {tag.capitalize()} {{#{name}-{tag}}}", *operations]
    parts.append(f"### Documents {{#{name}-documents}}")
    parts += ["\n\n".join(schema_parts(f"{name}-{each}", schemas[each])) for each in sorted(schemas)]
    return parts


def operation_parts(path: str, method: str, operation: Json) -> Iterator[str]:
    """Yield the parts of an endpoint's section."""
    yield f"#### {method.upper()} {path}"
    if operation.get("description"):
        yield operation["description"]
    parameters = operation.get("parameters", [])
    if parameters:
        rows = [
            (
                f"`{each['name']}`",
                each["in"],
                kind(each["schema"]),
                default(each["schema"]),
                each.get("description", ""),
            )
            for each in parameters
        ]
        yield table(("parameter", "in", "", "default", ""), rows)
    if "requestBody" in operation:
        yield f"Body: {content(operation['requestBody'])}"
    rows = [
        (status, content(response), response.get("description", ""))
        for status, response in sorted(operation["responses"].items())
    ]
    yield table(("status", "body", ""), rows)


def schema_parts(name: str, schema: Json) -> Iterator[str]:
    """Yield the parts of a document's section."""
    yield f"#### {name.partition('-')[2]} {{#{name.lower()}}}"
    if schema.get("description"):
        yield schema["description"].partition("\n\nArgs:")[0].partition("\n\nAttributes:")[0]
    required = schema.get("required", [])
    rows = [
        (f"`{field}`", kind(each), "required" if field in required else default(each), each.get("description", ""))
        for field, each in schema.get("properties", {}).items()
    ]
    if rows:
        yield table(("field", "", "default", ""), rows)


def content(body: Json) -> str:
    """Return the media types of a body with their schemas."""
    shown = []
    for media, each in body.get("content", {}).items():
        of = kind(each.get("schema", {}))
        shown.append(of if media in ("application/json", "application/problem+json") and of else f"`{media}`")
    return ", ".join(dict.fromkeys(shown)) or "none"


def kind(schema: Json) -> str:
    """Return the type of a schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name.partition('-')[2]}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(filter(None, map(kind, schema[key])))
    if schema.get("type") == "array":
        return f"array of {kind(schema.get('items', {})) or 'any'}"
    return "" if schema.get("type") == "null" else str(schema.get("type", "any"))


def default(schema: Json) -> str:
    """Return a schema's default as JSON."""
    return f"`{json.dumps(schema['default'])}`" if schema.get("default") is not None else ""


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.replace('|', '&#124;').split()) for cell in line)} |" for line in lines
    )
