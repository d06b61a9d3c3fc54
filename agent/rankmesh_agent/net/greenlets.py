"""Refusal of processes whose threads are greenlets: gevent and eventlet replace modules of Python."""

from __future__ import annotations

import sys

from rankmesh_agent.wire.errors import DistBackendError


def refuse_greenlets() -> None:
    """Raise DistBackendError where threads are greenlets: gevent or eventlet has replaced modules of Python."""
    for name, asked in ("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched"):
        is_replaced = getattr(sys.modules.get(name), asked, None)
        if is_replaced is not None and (
            replaced := [each for each in ("threading", "thread", "select", "socket") if is_replaced(each)]
        ):
            library = name.partition(".")[0]
            raise DistBackendError(
                f"{library} has replaced Python's {', '.join(replaced)} in this process. RankMesh waits in the "
                "kernel, and would stop all greenlets meanwhile, those of its own service and heartbeats included: run "
                f"this rank or store in a process of its own, without {library}'s monkey patching"
            )
