"""Every error RankMesh raises, in one tree.

::

    RuntimeError
    └── DistError
        ├── DistBackendError               a collective or point-to-point call failed
        │   ├── CollectiveMismatchError    the ranks did not make the same call
        │   ├── RankFailedError            a rank died or left while others waited for it
        │   ├── CollectiveTimeoutError     a deadline passed (also a TimeoutError)
        │   └── GroupAbortedError          the group was given up earlier; make a new one
        ├── DistNetworkError               a connection could not be made or kept
        │   ├── AddressInUseError          somebody else listens where we have to
        │   ├── AuthenticationError        the peer does not know the job's token
        │   ├── ProtocolError              the peer does not speak this protocol or version
        │   ├── GatewayUnreachableError    nobody answered at the gateway's address (also a TimeoutError)
        │   ├── JoinTimeoutError           not all ranks came in time (also a TimeoutError)
        │   ├── NoAgentsError              no standalone agent is registered at the gateway
        │   ├── NoFreeAgentError           standalone agents are registered, but none is free
        │   ├── RankTakenError             another live process holds this rank
        │   ├── AgentTakenError            the standalone agent is leased to somebody else
        │   ├── NotLeasedError             the standalone agent is free: it is in no job
        │   ├── LeaseEndedError            the lease of a standalone agent has ended
        │   └── WorldSizeMismatchError     the ranks disagree on the world size
        └── DistStoreError                 a key-value store operation failed
            ├── InvalidKeyError            a key is empty, too long or not text
            ├── InvalidValueError          a value is too large, or not what its encoding says
            ├── KeyNotFoundError           nobody has set the key
            ├── NotANumberError            the value cannot be added to (also a ValueError)
            ├── PreconditionFailedError    the value is not the one that a request was for
            ├── IdempotencyKeyReusedError  another request came under the key of an earlier one
            ├── QueueEmptyError            there is nothing in the queue
            ├── UnsupportedStoreError      this kind of store cannot do that (also a NotImplementedError)
            └── StoreTimeoutError          keys did not appear before the deadline (also a TimeoutError)

The names DistError, DistBackendError, DistNetworkError, DistStoreError and QueueEmptyError are torch.distributed's.
Each class owns its ``code`` (in frames and problem+json bodies) and its HTTP ``status``; the instances carry data, not
only text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class DistError(RuntimeError):
    """Base of all RankMesh errors.

    Attributes:
        ranks: the ranks the error is about (failed, missing, taken), global numbering.
        op: the operation in words, for example ``"all_reduce"``.
        group: the group's name.
        seq: the operation's sequence number in its group.
        address: the network address or URL concerned.
        first_failure: where the group had failed before the call: what ended it.
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
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.op = op
        self.group = group
        self.seq = seq
        self.address = address

    @property
    def message(self) -> str:
        """The text alone."""
        return str(self.args[0])

    def details(self) -> dict[str, Any]:
        """The data that is set, as JSON-ready values."""
        found = {
            "ranks": list(self.ranks),
            "op": self.op,
            "group": self.group,
            "seq": self.seq,
            "address": self.address,
        }
        return {name: value for name, value in found.items() if value not in (None, [])}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details()))


def _rebuild(kind: type[DistError], message: str, details: dict[str, Any]) -> DistError:
    return kind(message, **details)


class DistBackendError(DistError):
    """A collective or point-to-point call failed."""

    code = "backend-error"


class CollectiveMismatchError(DistBackendError):
    """The ranks of a group did not make the same call; no data was touched and the group stays usable."""

    code = "collective-mismatch"
    status = 409


class RankFailedError(DistBackendError):
    """A rank died or left while others waited for it; ``ranks`` names it."""

    code = "rank-failed"
    status = 503


class CollectiveTimeoutError(DistBackendError, TimeoutError):
    """A deadline passed; ``ranks`` are the ones that had not arrived."""

    code = "collective-timeout"
    status = 504


class GroupAbortedError(DistBackendError):
    """The group was given up after an earlier failure, here or at another rank."""

    code = "group-aborted"
    status = 410


class DistNetworkError(DistError):
    """A connection could not be made or kept."""

    code = "network-error"
    status = 502


class AddressInUseError(DistNetworkError):
    """Somebody else already listens at the address."""

    code = "address-in-use"
    status = 409


class AuthenticationError(DistNetworkError):
    """The peer could not prove that it knows the job's token."""

    code = "unauthenticated"
    status = 401


class ProtocolError(DistNetworkError):
    """The bytes received are not RankMesh's, or of another version, or over a limit."""

    code = "protocol-error"
    status = 400


class GatewayUnreachableError(DistNetworkError, TimeoutError):
    """No gateway answered at the address before the deadline."""

    code = "gateway-unreachable"
    status = 504


class JoinTimeoutError(DistNetworkError, TimeoutError):
    """Not every rank joined before the deadline; ``ranks`` are the missing ones."""

    code = "join-timeout"
    status = 504


class NoAgentsError(DistNetworkError):
    """No standalone agent is registered at the gateway."""

    code = "no-agents"
    status = 404


class NoFreeAgentError(DistNetworkError):
    """Standalone agents are registered at the gateway, but none is free; asking again later may help."""

    code = "no-free-agent"
    status = 503


class RankTakenError(DistNetworkError):
    """Another live process already holds this rank of the job."""

    code = "rank-taken"
    status = 409


class AgentTakenError(DistNetworkError):
    """The standalone agent is leased to somebody else."""

    code = "agent-taken"
    status = 409


class NotLeasedError(DistNetworkError):
    """The standalone agent is free: it is in no job, so it has no groups and no store."""

    code = "not-leased"
    status = 503


class LeaseEndedError(DistNetworkError):
    """The lease of a standalone agent has ended, or there is none of that id."""

    code = "lease-ended"
    status = 410


class WorldSizeMismatchError(DistNetworkError):
    """This process and those already there disagree on the world size."""

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
    """Nobody has set the key, or not before the time was over."""

    code = "key-not-found"
    status = 404


class InvalidValueError(DistStoreError):
    """A value is larger than a store takes, or not in the encoding it has to be in."""

    code = "invalid-value"
    status = 422


class NotANumberError(DistStoreError, ValueError):
    """The value is not decimal digits, or the sum would not fit into 64 bits."""

    code = "not-a-number"
    status = 409


class PreconditionFailedError(DistStoreError):
    """The key does not hold the value that the request was to replace or remove."""

    code = "precondition-failed"
    status = 412


class IdempotencyKeyReusedError(DistStoreError):
    """Another request came under the Idempotency-Key of an earlier one."""

    code = "idempotency-key-reused"
    status = 422


class QueueEmptyError(DistStoreError):
    """There is nothing in the queue."""

    code = "queue-empty"
    status = 404


class UnsupportedStoreError(DistStoreError, NotImplementedError):
    """This kind of store cannot do what it was asked to."""

    code = "store-unsupported"
    status = 501


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A key did not appear before the deadline."""

    code = "store-timeout"
    status = 408


def _tree(root: type[DistError]) -> dict[str, type[DistError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[DistError]] = _tree(DistError)
"""Each class by its wire code, to raise at this end what happened at the other."""


def from_code(code: str, message: str, **details: Any) -> DistError:
    """Return the error another process described; an unknown code (a newer peer's) becomes a plain DistError."""
    known = {
        name: details[name] for name in ("ranks", "op", "group", "seq", "address") if details.get(name) is not None
    }
    return BY_CODE.get(code, DistError)(message, **known)
