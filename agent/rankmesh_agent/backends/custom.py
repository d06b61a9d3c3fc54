"""Backend over an engine written by the user: ranks compare their calls over messages, the engine executes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.backends.fingerprint import verify
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire.errors import DistBackendError
from rankmesh_agent.wire.ops import Call

_log = logging.getLogger("rankmesh")


class CustomBackend(Backend):
    """Compares the ranks' calls over messages, then hands the call to the engine.

    Args:
        name: the name that ``get_backend()`` returns.
        engine: an object with a method for each collective that it offers, named as the function:
            ``all_reduce(array, op)``, ``reduce(array, op, root)``, ``broadcast(array, root)``,
            ``all_gather(outputs, array)``, ``gather(outputs, array, root)``, ``scatter(output, inputs, root)``,
            ``reduce_scatter(output, inputs, op)``, ``all_to_all(outputs, inputs)``, ``barrier()``, and optionally
            ``close()``. Arrays are one-dimensional, contiguous NumPy arrays, filled in place; roots are group ranks.
    """

    def __init__(self, name: str, engine: Any, link: MessageLink) -> None:
        self.name = self.medium = name  # type: ignore[misc]  # each engine has a name of its own
        self._engine = engine
        self._link = link

    def algorithm(self, call: Call) -> Algorithm:
        found = getattr(self._engine, call.name, None)
        if found is None:
            raise DistBackendError(f"backend {self.name!r} does not offer {call.name}", op=call.name)
        return found  # type: ignore[no-any-return]

    def run(self, algorithm: Algorithm, arguments: Sequence[Any], context: CallContext) -> None:
        verify(self._link, context)
        algorithm(*arguments)

    def close(self) -> None:
        try:
            getattr(self._engine, "close", lambda: None)()
        except Exception:
            _log.warning("backend %r: its engine could not be closed", self.name, exc_info=True)
