"""The error body, ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rankmesh_agent.wire.fields import Integer


@dataclass
class Problem:
    """An error body, ``application/problem+json`` (RFC 9457), with RankMesh's extension members.

    Attributes:
        type: ``about:blank``: the code identifies the error.
        title: the HTTP status as text.
        status: the HTTP status.
        detail: the event, its place, and the remedy.
        code: stable name of the error for programs.
        ranks, op, group, seq, address: the ranks, the operation with its group and number, the address concerned.
        missing_ranks: the ranks that did not arrive in time.
        first_failure: the failure that ended the group, if that preceded this request.
        retryable: true if the same request may succeed later, otherwise omitted.
    """

    type: str
    title: str
    status: Integer
    detail: str
    code: str
    ranks: list[Integer] | None = None
    op: str | None = None
    group: str | None = None
    seq: Integer | None = None
    address: str | None = None
    missing_ranks: list[int] | None = None
    first_failure: str | None = None
    retryable: bool | None = None

    def body(self) -> dict[str, Any]:
        """The members with a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}
