"""A gateway as a process at a fixed port, which tests kill and start again."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

from support.me import wait_until
from support.processes import Rank, Ranks, free_port


class GatewayProcess:
    """A gateway.

    Args:
        ranks: starts it.
        keeps_state: whether it has a state file.
        first: lines of Python that it runs before all else.
        options: more options of its command line.
    """

    def __init__(self, ranks: Ranks, *, keeps_state: bool = True, first: str = "", options: Sequence[str] = ()) -> None:
        self.ranks = ranks
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = ranks.folder / "state.sqlite"
        program = f"{first}\nimport sys, rankmesh_gateway.__main__ as main; sys.exit(main.main())"
        self._command = [sys.executable, "-c", program, f"--port={self.port}", *options]
        if keeps_state:
            self._command.append(f"--state={self.state}")
        self.process = self.start()

    def start(self) -> Rank:
        """Start it, for the first time or after its end."""
        self.process = self.ranks.launch(self._command, name="gateway")
        wait_until(lambda: "ready at" in self.process.stdout or self.process.code is not None, "the gateway")
        assert "ready at" in self.process.stdout, self.process
        return self.process

    def end(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, and wait for its end."""
        self.process.kill(number)
        self.ranks.wait([self.process])

    def ask(self, path: str) -> Any:
        """Return its answer to a GET."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
            return json.load(answer)
