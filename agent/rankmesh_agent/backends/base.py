"""What a backend does: carry out one call at a time, in the group's order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.ops import Call

MONITORED = "monitored"
"""The subject of a barrier that must name who is missing, without the end of the process, whatever carries it out."""


class CallContext(Protocol):
    """How a running call learns that it cannot go on. Ranks are group ranks."""

    seq: int
    call: Call

    @property
    def global_ranks(self) -> Sequence[int]:
        """The numbers the user knows the members by, by group rank."""

    def details(self) -> str:
        """Return what else there is to say of this rank's call when the ranks' calls do not fit together."""

    def check(self, missing: Callable[[], list[int]]) -> None:
        """Raise if waiting for those ``missing`` tells is in vain or too long; called now and then while asleep."""

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Move messages until ``ready()``; raise as ``check`` does. Both are called with the mesh's lock held."""


class Backend(ABC):
    """Carries out the calls of one group."""

    name: ClassVar[str]
    """What get_backend() says."""

    medium: str
    """What carries the data, for people: ``shm``, ``tcp``, ``shm+tcp`` (inside hosts, and between them), ``mpi`` or
    ``self``."""

    @property
    def segment(self) -> Segment | None:
        """Shared memory of all members that the backend runs over, None if there is none."""
        return None

    @abstractmethod
    def algorithm(self, call: Call) -> Algorithm:
        """Return what will carry out such a call."""

    @abstractmethod
    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        """Carry out a call.

        Raises:
            CollectiveMismatchError: the ranks did not make the same call; no array was touched.
            DistBackendError: the call failed half-way, the group cannot go on.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what the backend holds. Does nothing the second time."""
