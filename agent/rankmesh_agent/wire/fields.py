"""Field types of JSON bodies, with the bounds that msgspec checks and the OpenAPI document lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from rankmesh_agent.wire import json_text

MAX_WORLD_SIZE = 65_536
MAX_NAME = 255
"""Maximum characters of a job's name, an instance, a host name, an address or a URL."""
MAX_ADDRESSES = 64
"""Maximum number of addresses, or URLs, of one member or agent."""
MAX_REASON = 4096
"""Maximum characters of a reason, and of a lease's holder."""
MAX_SECONDS = 86_400.0
"""Maximum of the timeouts that clients of HTTP give: a day."""
MAX_INTEGER = (1 << 63) - 1

Integer = Annotated[int, Meta(ge=-MAX_INTEGER - 1, le=MAX_INTEGER)]
Base64 = Annotated[
    str,
    Meta(
        extra_json_schema={
            "pattern": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
            "contentEncoding": "base64",
        }
    ),
]
"""Bytes in JSON. The reader checks them, and raises its own error."""
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"\S")]
"""A name, which is not blank."""
Text = Annotated[str, Meta(max_length=MAX_NAME)]
"""A host name, an address or a URL."""
Texts = Annotated[list[Text], Meta(max_length=MAX_ADDRESSES)]
Integers = Annotated[list[Integer], Meta(max_length=MAX_ADDRESSES)]
Rank = Annotated[int, Meta(ge=-1, le=MAX_WORLD_SIZE - 1)]
"""A rank, or -1 for an unassigned one."""
Ranks = Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_WORLD_SIZE)]], Meta(min_length=1, max_length=MAX_WORLD_SIZE)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
Epoch = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
"""Counts the complete worlds of a job."""


class Body:
    """Base class of the bodies of requests: FastAPI, too, has msgspec read them."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        def read(document: object) -> object:
            return json_text.convert(cls, document) if isinstance(document, dict) else document

        return {"type": "function-before", "function": {"type": "no-info", "function": read}, "schema": handler(source)}
