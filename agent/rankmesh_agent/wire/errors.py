"""All errors that RankMesh raises, in one tree.

The names DistError, DistBackendError, DistNetworkError, DistStoreError and QueueEmptyError are torch.distributed's.
Each class has its ``code`` (in frames and problem+json bodies) and its HTTP ``status``, by default its base's; the
instances carry data beside the text.
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

    def __init_subclass__(cls, code: str = "", status: int = 0, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.code, cls.status = code or cls.code, status or cls.status

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


class DistBackendError(DistError, code="backend-error"):
    """A collective or point-to-point call failed."""


class CollectiveMismatchError(DistBackendError, code="collective-mismatch", status=409):
    """The ranks of a group did not make the same call; no data has moved and the group stays usable."""


class RankFailedError(DistBackendError, code="rank-failed", status=503):
    """A rank died or left while others waited for it; ``ranks`` contains it."""


class CollectiveTimeoutError(DistBackendError, TimeoutError, code="collective-timeout", status=504):
    """A deadline passed; ``ranks`` contains the ranks that had not arrived."""


class GroupAbortedError(DistBackendError, code="group-aborted", status=410):
    """The group was aborted after an earlier failure, at this rank or another one."""


class DistNetworkError(DistError, code="network-error", status=502):
    """A connection could not be made or kept."""


class AddressInUseError(DistNetworkError, code="address-in-use", status=409):
    """Another process already listens at the address."""


class AuthenticationError(DistNetworkError, code="unauthenticated", status=401):
    """The peer could not prove that it knows the job's token."""


class ForbiddenJobError(AuthenticationError, code="forbidden-job", status=403):
    """The credential is that of another job than the request, or of one job where the request spans several."""


class ProtocolError(DistNetworkError, code="protocol-error", status=400):
    """The received bytes are not RankMesh's, have another version, or exceed a limit."""


class GatewayUnreachableError(DistNetworkError, TimeoutError, code="gateway-unreachable", status=504):
    """No gateway responded at the address before the deadline."""


class JoinTimeoutError(DistNetworkError, TimeoutError, code="join-timeout", status=504):
    """Not every rank joined before the deadline; ``ranks`` contains the missing ones."""


class NoAgentsError(DistNetworkError, code="no-agents", status=404):
    """No standalone agent is registered at the gateway."""


class NoFreeAgentError(DistNetworkError, code="no-free-agent", status=503):
    """Standalone agents are registered at the gateway, but none is free; a later request may succeed."""


class RankTakenError(DistNetworkError, code="rank-taken", status=409):
    """Another live process already holds this rank of the job."""


class JobEndedError(DistNetworkError, code="job-ended", status=410):
    """All ranks of the job have left, so that its world cannot grow."""


class AgentTakenError(DistNetworkError, code="agent-taken", status=409):
    """Another client leases the standalone agent."""


class NotLeasedError(DistNetworkError, code="not-leased", status=503):
    """The standalone agent is free: it is in no job, so it has no groups and no store."""


class LeaseEndedError(DistNetworkError, code="lease-ended", status=410):
    """The lease of a standalone agent has ended, or no lease has the id."""


class WorldSizeMismatchError(DistNetworkError, code="world-size-mismatch", status=409):
    """This process and the other processes of the job disagree on the world size."""


class DistStoreError(DistError, code="store-error", status=400):
    """A key-value store operation failed."""


class InvalidKeyError(DistStoreError, code="invalid-key", status=422):
    """A key is empty, too long or not text, or there are too many keys to wait for."""


class KeyNotFoundError(DistStoreError, code="key-not-found", status=404):
    """The key has no value, or got none before the deadline."""


class InvalidValueError(DistStoreError, code="invalid-value", status=422):
    """A value exceeds the limit of the store, or is not in its encoding."""


class NotANumberError(DistStoreError, ValueError, code="not-a-number", status=409):
    """The value is not decimal digits, or the sum does not fit into 64 bits."""


class PreconditionFailedError(DistStoreError, code="precondition-failed", status=412):
    """The key does not hold the expected value of a replacement or a removal."""


class IdempotencyKeyReusedError(DistStoreError, code="idempotency-key-reused", status=422):
    """Another request has used the Idempotency-Key before."""


class StoreFullError(DistStoreError, code="store-full", status=413):
    """The store has as many keys, or bytes, as RANKMESH_STORE_KEYS and RANKMESH_STORE_BYTES allow."""


class StoreLostError(DistStoreError, code="store-lost", status=503):
    """The gateway does not have the job's keys and values any more: it was restarted, and had kept no state."""


class QueueEmptyError(DistStoreError, code="queue-empty", status=404):
    """The queue is empty."""


class UnsupportedStoreError(DistStoreError, NotImplementedError, code="store-unsupported", status=501):
    """The store does not support the operation."""


class StoreTimeoutError(DistStoreError, TimeoutError, code="store-timeout", status=408):
    """A key did not appear before the deadline."""


class StoreUnresponsiveError(StoreTimeoutError, DistNetworkError, code="store-unresponsive", status=502):
    """The process that owns a store's keys is connected, but did not respond before the deadline."""


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
    """Return the error of a document."""
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
