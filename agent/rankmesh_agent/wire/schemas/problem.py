"""The error body, ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rankmesh_agent.wire.fields import Integer


@dataclass
class Problem:
    """An error body, ``application/problem+json`` (RFC 9457), with the extension members RankMesh uses.

    Attributes:
        type: ``about:blank``, as the code says it all.
        title: the HTTP status in words.
        status: the HTTP status.
        detail: what happened, where, and what to do.
        code: stable name of the error for programs.
        ranks: the ranks concerned.
        op: the operation concerned.
        group: the group concerned.
        seq: the operation's sequence number.
        address: the address concerned.
        missing_ranks: the ranks that did not come in time.
        first_failure: what ended the group, where that was before this request.
        retryable: true where the same request may succeed later; left out otherwise.
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
        """The members that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}
