"""A rank whose collectives are made in another process, to which the members' memory was lent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call


class RankElsewhereError(DistBackendError):
    """The rank's collectives are made by the process that is attached to its agent."""

    code = "rank-elsewhere"
    status = 409


class DelegatedBackend(Backend):
    """Refuses every call: two would take this rank's part in it."""

    name: ClassVar[str] = "mesh"
    medium = "shm"

    def algorithm(self, call: Call) -> Algorithm:
        self._refuse(call)

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        self._refuse(watch.call)

    def close(self) -> None:
        """Nothing to let go of."""

    def _refuse(self, call: Call) -> NoReturn:
        raise RankElsewhereError(
            f"{call.name}: the process that is attached to this agent makes this rank's collectives itself; make the "
            "call there, or end its lease first",
            op=call.name,
        )
