"""All errors that RankMesh raises, in one tree.

The names DistError, DistBackendError, DistNetworkError, DistStoreError and QueueEmptyError are torch.distributed's.
Each class defines its ``code`` (in frames and problem+json bodies) and its HTTP ``status``; the instances carry data
beside the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, TypeVar

from rankmesh_agent.wire.printable import printable_lines
from rankmesh_agent.wire.ranges import numbers_in, ranges

E = TypeVar("E", bound=BaseException)

_DETAILS = ("ranks", "op", "group", "seq", "address")
"""Attributes of an error that cross process boundaries."""
_MAX_CHARACTERS, _MAX_RANGES = 4000, 30_000
"""Characters of a text, and of ranks as ranges, in a frame: all of them fit, whatever the text's language."""


class DistError(RuntimeError):
    """Base of all RankMesh errors.

    Attributes:
        ranks: global ranks concerned (failed, missing, taken).
        op, group, seq: the operation, for example ``"all_reduce"``, its group's name, and its number in the group.
        address: the network address or URL concerned.
        first_failure: the failure that ended the group, if that preceded the call.
        retryable: whether the same request may succeed later.
    """

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: bool = False
    first_failure: str | None = None

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        op: str | None = None,
        group: str | None = None,
        seq: int | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(printable_lines(message))  # it may quote what another process has sent
        self.ranks = tuple(ranks)
        self.op = op
        self.group = group
        self.seq = seq
        self.address = address

    @property
    def message(self) -> str:
        """The text without the data."""
        return str(self.args[0])

    def details(self) -> dict[str, Any]:
        """The data that is set, as JSON-ready values."""
        found = {name: value for name in _DETAILS if (value := getattr(self, name)) not in (None, ())}
        return found | {"ranks": list(self.ranks)} if self.ranks else found

    def document(self) -> dict[str, Any]:
        """The error as JSON-ready values; see ``from_document``."""
        return self.details() | {"code": self.code, "message": self.message}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.details()), (self.message,)


class DistBackendError(DistError):
    """A collective or point-to-point call failed."""

    code = "backend-error"


class CollectiveMismatchError(DistBackendError):
    """The ranks of a group did not make the same call; no data has moved and the group stays usable."""

    code = "collective-mismatch"
    status = 409


class RankFailedError(DistBackendError):
    """A rank died or left while others waited for it; ``ranks`` contains it."""

    code = "rank-failed"
    status = 503


class CollectiveTimeoutError(DistBackendError, TimeoutError):
    """A deadline passed; ``ranks`` contains the ranks that had not arrived."""

    code = "collective-timeout"
    status = 504


class GroupAbortedError(DistBackendError):
    """The group was aborted after an earlier failure, at this rank or another one."""

    code = "group-aborted"
    status = 410


class DistNetworkError(DistError):
    """A connection could not be made or kept."""

    code = "network-error"
    status = 502


class AddressInUseError(DistNetworkError):
    """Another process already listens at the address."""

    code = "address-in-use"
    status = 409


class AuthenticationError(DistNetworkError):
    """The peer could not prove that it knows the job's token."""

    code = "unauthenticated"
    status = 401


class ForbiddenJobError(AuthenticationError):
    """The credential is that of another job than the request, or of one job where the request spans several."""

    code = "forbidden-job"
    status = 403


class ProtocolError(DistNetworkError):
    """The received bytes are not RankMesh's, have another version, or exceed a limit."""

    code = "protocol-error"
    status = 400


class GatewayUnreachableError(DistNetworkError, TimeoutError):
    """No gateway responded at the address before the deadline."""

    code = "gateway-unreachable"
    status = 504


class JoinTimeoutError(DistNetworkError, TimeoutError):
    """Not every rank joined before the deadline; ``ranks`` contains the missing ones."""

    code = "join-timeout"
    status = 504


class NoAgentsError(DistNetworkError):
    """No standalone agent is registered at the gateway."""

    code = "no-agents"
    status = 404


class NoFreeAgentError(DistNetworkError):
    """Standalone agents are registered at the gateway, but none is free; a later request may succeed."""

    code = "no-free-agent"
    status = 503


class RankTakenError(DistNetworkError):
    """Another live process already holds this rank of the job."""

    code = "rank-taken"
    status = 409


class JobEndedError(DistNetworkError):
    """All ranks of the job have left, so that its world cannot grow."""

    code = "job-ended"
    status = 410


class AgentTakenError(DistNetworkError):
    """Another client leases the standalone agent."""

    code = "agent-taken"
    status = 409


class NotLeasedError(DistNetworkError):
    """The standalone agent is free: it is in no job, so it has no groups and no store."""

    code = "not-leased"
    status = 503


class LeaseEndedError(DistNetworkError):
    """The lease of a standalone agent has ended, or no lease has the id."""

    code = "lease-ended"
    status = 410


class WorldSizeMismatchError(DistNetworkError):
    """This process and the other processes of the job disagree on the world size."""

    code = "world-size-mismatch"
    status = 409


class DistStoreError(DistError):
    """A key-value store operation failed."""

    code = "store-error"
    status = 400


class InvalidKeyError(DistStoreError):
    """A key is empty, too long or not text, or there are too many keys to wait for."""

    code = "invalid-key"
    status = 422


class KeyNotFoundError(DistStoreError):
    """The key has no value, or got none before the deadline."""

    code = "key-not-found"
    status = 404


class InvalidValueError(DistStoreError):
    """A value exceeds the limit of the store, or is not in its encoding."""

    code = "invalid-value"
    status = 422


class NotANumberError(DistStoreError, ValueError):
    """The value is not decimal digits, or the sum does not fit into 64 bits."""

    code = "not-a-number"
    status = 409


class PreconditionFailedError(DistStoreError):
    """The key does not hold the expected value of a replacement or a removal."""

    code = "precondition-failed"
    status = 412


class IdempotencyKeyReusedError(DistStoreError):
    """Another request has used the Idempotency-Key before."""

    code = "idempotency-key-reused"
    status = 422


class StoreFullError(DistStoreError):
    """The store has as many keys, or bytes, as RANKMESH_STORE_KEYS and RANKMESH_STORE_BYTES allow."""

    code = "store-full"
    status = 413


class StoreLostError(DistStoreError):
    """The gateway does not have the job's keys and values any more: it was restarted, and had kept no state."""

    code = "store-lost"
    status = 503


class QueueEmptyError(DistStoreError):
    """The queue is empty."""

    code = "queue-empty"
    status = 404


class UnsupportedStoreError(DistStoreError, NotImplementedError):
    """The store does not support the operation."""

    code = "store-unsupported"
    status = 501


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A key did not appear before the deadline."""

    code = "store-timeout"
    status = 408


class StoreUnresponsiveError(StoreTimeoutError, DistNetworkError):
    """The process that owns a store's keys is connected, but did not respond before the deadline."""

    code = "store-unresponsive"
    status = 502


def _tree(root: type[DistError]) -> dict[str, type[DistError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[DistError]] = _tree(DistError)
"""Each class by its wire code, to raise at this end the error of the other end."""


def from_code(code: str, message: str, **details: Any) -> DistError:
    """Return the error that another process described; an unknown code (of a newer peer) becomes a plain DistError.

    Details of another type than an error's are left out.
    """
    known = {name: value for name in _DETAILS if (value := details.get(name)) is not None and _is_detail(name, value)}
    return BY_CODE.get(code, DistError)(message, **known)


def from_document(document: dict[str, Any]) -> DistError:
    """Return the error of a document.

    Raises:
        KeyError, TypeError: it is none.
    """
    details = dict(document)
    return from_code(str(details.pop("code")), str(details.pop("message")), **details)


def to_frame(error: DistError) -> dict[str, Any]:
    """Return the document of an error that fits into a frame without a posted buffer: its ranks as ranges."""
    ranks, message = ranks_to_frame(error.ranks), error.message[:_MAX_CHARACTERS]
    return error.details() | {"code": error.code, "message": message, "ranks": ranks}


def ranks_to_frame(ranks: Sequence[int]) -> str:
    """Return ranks as ranges; the first ones if there are too many for a frame."""
    text = ",".join(ranges(ranks))
    return text if len(text) <= _MAX_RANGES else text[:_MAX_RANGES].rpartition(",")[0]


def from_frame(found: dict[str, Any]) -> DistError:
    """Return the error of a document that ``to_frame`` has made; raises ValueError, too."""
    return from_document(found | {"ranks": numbers_in(found.get("ranks", ""))})


def without_traceback(error: E) -> E:
    """Return an error to keep, or to raise again: a copy if it is RankMesh's.

    The traceback of an error that is raised again grows, and its frames keep the arrays of calls allocated.
    """
    if not isinstance(error, DistError):
        return error
    copied = type(error)(error.args[0])
    vars(copied).update(vars(error))
    return copied


def _is_detail(name: str, value: Any) -> bool:
    if name == "ranks":
        return isinstance(value, Sequence) and all(isinstance(rank, Integral) for rank in value)
    return isinstance(value, Integral if name == "seq" else str)
