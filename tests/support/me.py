"""What a rank that a test started has besides RankMesh.

Every rank of every test imports this: no pytest, no HTTP, nothing that takes long to import.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

DEADLINE = 180.0
"""Seconds any run or wait may take."""
RANK_FAILED = "rank-failed"
"""The mark that ends the ranks' waits for other marks: one of those that have to succeed has failed."""
GATEWAY = "TEST_GATEWAY"
"""The variable in which ranks find the gateway that has agents, if they are to attach."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """Wait until ``condition()`` is true and return it; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.01)
    return result


class Me:
    """A rank, as the body that runs in its process sees it."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        # A shell's background jobs ignore SIGINT, and what they start does too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.rank = rank
        self.size = size
        self.folder = Path(folder)

    def init(self, **options: Any) -> None:
        """Join the job of all ranks of this run."""
        import rankmesh

        method = os.environ.get(GATEWAY) or f"file://{self.folder}/rendezvous"
        rankmesh.init_process_group(**{"init_method": method, "rank": self.rank, "world_size": self.size, **options})

    def join(self, **options: Any) -> None:
        """Join the job of the run's first ranks when its world grows."""
        import rankmesh

        method = os.environ.get(GATEWAY) or f"file://{self.folder}/rendezvous"
        rankmesh.init_process_group(**{"init_method": method, "join": True, **options})

    def limit_calls(self, seconds: float) -> None:
        """Give the world's next calls a time limit that the join did not have: it takes long on a busy machine."""
        import rankmesh

        assert rankmesh.group.WORLD is not None
        rankmesh.group.WORLD._communicator.set_timeout(seconds)

    def report(self, **what: Any) -> None:
        """Tell the test something: it finds it in ``Rank.reported``."""
        print(json.dumps(what), flush=True)

    def mark(self, name: str) -> None:
        """Make a mark."""
        (self.folder / name).touch()

    def wait_for(self, *names: str, seconds: float = DEADLINE) -> None:
        """Wait for marks; fail at once when a rank has failed that had to succeed."""
        for name in names:
            wait_until(partial(self._is_made, name), f"the mark {name!r}", seconds)

    def _is_made(self, name: str) -> bool:
        if (self.folder / name).exists():
            return True
        assert not (self.folder / RANK_FAILED).exists(), f"another rank failed while this one waited for {name!r}"
        return False

    def meet(self, name: str) -> None:
        """Wait until all ranks have come here, without RankMesh."""
        self.mark(f"{name}-{self.rank}")
        self.wait_for(*(f"{name}-{rank}" for rank in range(self.size)))

    def mark_when_waiting(self, name: str, waits: int = 1) -> None:
        """Make a mark as soon as so many calls of this process wait for keys of the job's store, in other threads."""
        from rankmesh._session.session import require_session

        agent: Any = require_session().agent  # this process's own
        store = agent.store

        def watch() -> None:
            wait_until(lambda: len(store.pending_waits()) == waits, f"{waits} waits for keys")
            self.mark(name)

        threading.Thread(target=watch, daemon=True).start()

    def attempt(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Call something that is to fail; return the error as plain data, and how long it took."""
        began = time.monotonic()
        try:
            call(*arguments, **options)
        except BaseException as error:
            caught: BaseException | None = error
        else:
            caught = None
        now = time.monotonic()
        return {
            "error": type(caught).__name__ if caught is not None else None,
            "is": [kind.__name__ for kind in type(caught).__mro__],
            "text": str(caught) if caught is not None else "",
            "ranks": list(getattr(caught, "ranks", ())),
            "address": getattr(caught, "address", None),
            "seconds": now - began,
            "at": now,
        }

    def resources(self) -> tuple[list[str], dict[str, int]]:
        """Return the names of the threads, and the open descriptors by kind and how many."""
        gc.collect()
        kinds: dict[str, int] = {}
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                target = re.sub(r":\[\d+\]|#\d+", "", os.readlink(f"/proc/self/fd/{descriptor}"))
            except OSError:
                continue  # the descriptor of the listing itself
            kinds[target] = kinds.get(target, 0) + 1
        return sorted(thread.name for thread in threading.enumerate()), kinds

    def interrupt_when_waiting(self, again: float | None = None) -> None:
        """Press Ctrl-C as soon as the main thread has been inside RankMesh for a moment; says ``interrupted_at``.

        Args:
            again: seconds after which it is pressed a second time.
        """
        main = threading.main_thread().ident
        assert main is not None

        def watch() -> None:
            seen = 0
            while seen < 10:
                time.sleep(0.05)
                files = [frame.filename for frame in traceback.extract_stack(sys._current_frames()[main])]
                imports = any("importlib" in file for file in files)  # on a busy machine, they take as long
                seen = seen + 1 if any("/rankmesh" in file for file in files) and not imports else 0
            self.report(interrupted_at=time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            if again is not None:
                time.sleep(again)
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=watch, daemon=True).start()
