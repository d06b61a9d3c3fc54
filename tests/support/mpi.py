"""Ranks that mpirun starts."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.processes import Ranks, on_ranks

_BESIDE = Path(sys.executable).parent / "mpirun"
MPIRUN = str(_BESIDE) if _BESIDE.exists() else shutil.which("mpirun")
"""The launcher: this environment's if it has one."""
OPTIONS = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
ULFM = ("--with-ft", "ulfm")
"""Options with which MPI goes on after the death of a rank."""
_STARTER = Path(__file__).parent / "mpi_rank.py"


def missing() -> str:
    """Return what these tests lack here, '' if nothing."""
    lacking = [
        name for name, there in (("mpi4py", importlib.util.find_spec("mpi4py")), ("mpirun", MPIRUN)) if not there
    ]
    return f"{' and '.join(lacking)} not installed: make .venv/.mpi" if lacking else ""


def files_in(folder: Path) -> dict[str, str]:
    """Return the variable that has Open MPI make its files in a folder: killed ranks, and single ones, leave them."""
    return {"OMPI_MCA_btl_sm_backing_directory": str(folder)}


class MpiRun:
    """A program that mpirun runs.

    Args:
        ranks: starts processes, and sees to it that nothing of them is left.
        body: what the ranks run: see support.processes.
        size: how many there are.
        options: of mpirun.
        env, arguments: as for Ranks.start.
    """

    def __init__(
        self,
        ranks: Ranks,
        body: Callable[..., Any],
        size: int,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] = {},  # never changed
        **arguments: Any,
    ) -> None:
        self._ranks = ranks
        self.size = size
        self.prefix = ranks.folder / f"mpi-{len(ranks.started)}"
        script = ranks.script(body, **arguments)
        assert MPIRUN is not None
        self.mpirun = ranks.launch(
            [MPIRUN, *OPTIONS, *options, "-n", str(size), sys.executable, str(_STARTER), str(self.prefix), str(script)],
            name="mpirun",
            **files_in(ranks.folder),
            **env,
        )

    def output(self, rank: int) -> str:
        """Return what a rank wrote to standard output."""
        return self._read(rank, "out")

    def errors(self, rank: int) -> str:
        """Return what a rank wrote to Python's standard error: what MPI itself says is not in it."""
        return self._read(rank, "err")

    def reported(self, rank: int) -> dict[str, Any]:
        """Return what a rank reported, merged."""
        merged: dict[str, Any] = {}
        for line in self.output(rank).splitlines():
            if line.startswith("{"):
                merged |= json.loads(line)
        return merged

    def succeed(self, seconds: float = 120) -> list[dict[str, Any]]:
        """Wait until all have ended well, with nothing in ``errors``; return what they reported."""
        self.end(seconds)
        quiet = not any(self.errors(rank) for rank in range(self.size))
        assert (self.mpirun.code, quiet) == (0, True), self.transcript()
        return [self.reported(rank) for rank in range(self.size)]

    def end(self, seconds: float = 120) -> None:
        """Wait until all have ended."""
        try:
            self._ranks.wait([self.mpirun], seconds)
        except AssertionError as error:
            self.mpirun.kill(signal.SIGTERM)  # it ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.mpirun.process.wait(10)
            raise AssertionError(f"{error}\n{self.transcript()}") from None

    def transcript(self) -> str:
        """Return what all of them wrote."""
        each = [
            f"--- rank {rank}\n{self.output(rank)}{self.errors(rank)}{self._read(rank, 'mpi')}"
            for rank in range(self.size)
        ]
        return "\n".join([repr(self.mpirun), *each])

    def _read(self, rank: int, kind: str) -> str:
        path = Path(f"{self.prefix}-{rank}.{kind}")
        return path.read_text(errors="replace") if path.exists() else ""


def run(ranks: Ranks, body: Callable[..., Any], size: int, **options: Any) -> list[dict[str, Any]]:
    """Run a body under mpirun; return what the ranks reported, once all have succeeded. See MpiRun."""
    return MpiRun(ranks, body, size, **options).succeed()


on_mpi = functools.partial(on_ranks, run=run)
"""As on_ranks, under mpirun."""
