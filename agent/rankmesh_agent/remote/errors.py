"""Errors on their way from an agent to the process that is attached to it, or back."""

from __future__ import annotations

from typing import Any

from rankmesh_agent.wire.errors import DistBackendError, DistError, from_code

_KNOWN: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (TypeError, ValueError, RuntimeError, IndexError, OverflowError, MemoryError, NotImplementedError)
}


def described(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data."""
    if isinstance(error, DistError):
        return {**error.details(), "code": error.code, "message": error.message}
    return {"type": type(error).__name__, "message": str(error)}


def revived(said: dict[str, Any], *, at_agent: bool = False) -> BaseException:
    """Return the error that the other end described.

    Args:
        said: what it said.
        at_agent: this end is the agent: errors of unknown types keep their names, which the other ranks are told.
    """
    details = dict(said)
    message = str(details.pop("message", ""))
    if "code" in details:
        return from_code(str(details.pop("code")), message, **details)
    name = str(details.get("type", ""))
    if name in _KNOWN:
        return _KNOWN[name](message)
    if at_agent:
        kind: type[Exception] = type(name if name.isidentifier() else "Exception", (Exception,), {})
        return kind(message)
    return DistBackendError(f"the agent could not carry the call out: {name}: {message}")
