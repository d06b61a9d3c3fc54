"""An engine from outside this project, written in Python, behind the same order, queue and checks as the mesh."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.backends.fingerprint import verify
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.progress.message_link import VerifiedLink
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call

_log = logging.getLogger("rankmesh")


class CustomBackend(CpuBackend):
    """Has the ranks meet and compare their calls over the mesh, then hands the call to the engine.

    Args:
        name: what get_backend() says.
        engine: an object with a method for each collective it carries out, named as the function:
            ``all_reduce(array, op)``, ``reduce(array, op, root)``, ``broadcast(array, root)``,
            ``all_gather(outputs, array)``, ``gather(outputs, array, root)``, ``scatter(output, inputs, root)``,
            ``reduce_scatter(output, inputs, op)``, ``all_to_all(outputs, inputs)``, ``barrier()``, and optionally
            ``close()``. Arrays are one-dimensional, contiguous NumPy arrays, filled in place; roots are group ranks.
        link: messages among the members.
        ranks: global ranks of the members, by group rank.
    """

    def __init__(self, name: str, engine: Any, link: VerifiedLink, ranks: Sequence[int]) -> None:
        super().__init__(link, ranks, None)
        self.name = name  # type: ignore[misc]  # the mesh has one name, engines from outside have theirs
        self.medium = name
        self._engine = engine

    def algorithm(self, call: Call) -> Algorithm:
        found = getattr(self._engine, call.name, None)
        if found is None:
            raise DistBackendError(f"backend {self.name!r} does not offer {call.name}", op=call.name)
        return found  # type: ignore[no-any-return]

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], watch: CallContext) -> None:
        verify(self._link, watch)
        algorithm(*arguments)

    def close(self) -> None:
        try:
            getattr(self._engine, "close", lambda: None)()
        except Exception:
            _log.warning("backend %r: its engine could not be closed", self.name, exc_info=True)
