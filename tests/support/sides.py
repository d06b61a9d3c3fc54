"""The same code on torch.distributed with gloo, on rankmesh, and on torch.distributed with the backend ``rankmesh``.

A *cell* is a function ``cell(dist, rank, size, ...)``, written once against the torch API, which returns plain data and
tensors. A process a rank runs every cell of some modules with each library as ``dist`` and writes down what came: the
value, or the exception. ``python -m support.sides RANK SIZE FOLDER KIND MODULE...`` is such a process; KINDS has the
kinds. gloo and rankmesh are compared in one process, which is in a job of each. torch.distributed has one default group
a process: where the mesh is its backend, that is in processes of their own.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import json
import secrets
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch
import torch.distributed

import rankmesh
import rankmesh.torch
from support.processes import Ranks, wait_until

TIMEOUT = timedelta(seconds=90)


class Over:
    """torch.distributed with the mesh as its backend, wherever a cell says gloo.

    Two things differ from torch's module: ``monitored_barrier``, which torch refuses to all backends but gloo, is that
    of ``rankmesh.torch``, and who asks ``dist is torch.distributed`` to know whether this is gloo gets a no.
    """

    __name__ = "rankmesh.torch"
    monitored_barrier = staticmethod(rankmesh.torch.monitored_barrier)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def init_process_group(self, backend: Any = None, *arguments: Any, **options: Any) -> None:
        torch.distributed.init_process_group("rankmesh" if backend == "gloo" else backend, *arguments, **options)


BOTH: Mapping[str, Any] = {"gloo": torch.distributed, "rankmesh": rankmesh}
OVER: Mapping[str, Any] = {"over": Over()}


def join(sides: Mapping[str, Any], rank: int, size: int, folder: Path) -> Mapping[str, Any]:
    """Make this process a rank of a job of each side's."""
    for name, dist in sides.items():
        method = f"file://{folder}/{name}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=TIMEOUT)
    return sides


def join_groups(rank: int, size: int, folder: Path) -> Mapping[str, Any]:
    """Make this process a rank of a job over the mesh, in which gloo has a group of all ranks."""
    join(OVER, rank, size, folder)
    return {"over": torch.distributed.group.WORLD, "gloo": torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)}


KINDS: dict[str, Callable[[int, int, Path], Mapping[str, Any]]] = {
    "both": lambda *where: join(BOTH, *where),
    "both-apart": lambda *where: BOTH,
    "over": lambda *where: join(OVER, *where),
    "over-apart": lambda *where: OVER,
    "groups": join_groups,
}
"""The kinds of processes: functions of rank, world size and folder that return what a cell gets first, by side.

That is a library, but where the sides are two groups of torch.distributed.
"""


class Cell(NamedTuple):
    """One piece of code to run on both sides.

    Attributes:
        name: its function's name, and its arguments.
        function: the code.
        arguments: what it gets besides the library, the rank and the world's size.
        sizes: world sizes in which it makes sense.
        sides: those on which it does; None for all.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    sizes: tuple[int, ...]
    sides: tuple[str, ...] | None

    def __call__(self, dist: Any, rank: int, size: int) -> Any:
        return self.function(dist, rank, size, **self.arguments)


class Outcome(NamedTuple):
    """What came of a cell at one rank on one side.

    Attributes:
        value: the value as text, exact; None if there was an exception.
        error: the names of the exception's classes, from its own up to the builtin ones; None if there was none.
        text: what the exception says.
        seconds: how long it took.
    """

    value: str | None
    error: list[str] | None
    text: str
    seconds: float

    def __str__(self) -> str:
        return str(self.value) if self.error is None else f"{self.error[0]}: {self.text}"


Told = dict[str, list[dict[str, Outcome]]]
"""By the cell's name and then by rank: what came of it on each side."""


class Cells:
    """The cells of a module, in order; an instance decorates the functions."""

    def __init__(self) -> None:
        self.found: dict[str, Cell] = {}

    def __call__(
        self, *, sizes: tuple[int, ...] = (1, 2, 3), sides: tuple[str, ...] | None = None, **arguments: Any
    ) -> Callable[..., Any]:
        """Make a cell of a function, or one for each combination of the lists that ``arguments`` are."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for values in itertools.product(*arguments.values()):
                words = "-".join(map(str, values))
                name = f"{function.__name__}[{words}]" if words else function.__name__
                assert name not in self.found, f"there are two cells {name}"
                self.found[name] = Cell(name, function, dict(zip(arguments, values, strict=True)), sizes, sides)
            return function

        return add

    def of(self, size: int) -> dict[str, Cell]:
        """Return the cells that make sense in a world of this size."""
        return {name: cell for name, cell in self.found.items() if size in cell.sizes}


def outcome(call: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call something and return what came of it."""
    began = time.monotonic()
    value, error, text = None, None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each library warns in its own words
            value = repr(plain(call(*arguments)))
    except (Exception, pytest.fail.Exception) as caught:
        error, text = [kind.__name__ for kind in type(caught).__mro__], str(caught)
        if isinstance(caught, AssertionError):
            text = f"{traceback.extract_tb(caught.__traceback__)[-1].line} {text}"
    return Outcome(value, error, text, time.monotonic() - began)


def plain(value: Any) -> Any:
    """Return a value with its tensors as ``(dtype, shape, elements)``."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        wide = value.detach().to(torch.complex64) if value.dtype is torch.complex32 else value.detach()
        return dtype, tuple(value.shape), wide.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


def run_cells(ranks: Ranks, modules: Sequence[str], size: int, kind: str) -> Told:
    """Run the cells of some modules in ``size`` processes.

    Args:
        ranks: starts them.
        modules: their names; the cells of each are ``module.cell``.
        size: world size.
        kind: of which of KINDS the processes are.
    """
    arguments = [str(size), str(ranks.folder), kind, *modules]
    secret = {"RANKMESH_TOKEN": "a secret"}  # so that objects are pickled, as in torch
    started = [
        ranks.command("-m", "support.sides", str(rank), *arguments, name=f"rank-{rank}", **secret)
        for rank in range(size)
    ]
    ranks.wait(started, seconds=240.0)
    for rank in started:
        ours = [line for line in rank.stderr.splitlines() if ".cpp:" not in line]  # the rest is torch's own log
        assert (rank.code, ours) == (0, []), ranks.told()
    return _read(ranks.folder, size)


def _read(folder: Path, size: int) -> Told:
    by_rank = [json.loads((folder / f"outcomes-{rank}").read_text()) for rank in range(size)]
    return {
        name: [{side: Outcome(*told) for side, told in rank[name].items()} for rank in by_rank] for name in by_rank[0]
    }


class _Failed(Told):
    """What a world tells that failed."""

    def __missing__(self, name: str) -> None:
        raise AssertionError("the processes failed: see the first test that wanted to know from them")


class Worlds:
    """What came of the cells in worlds of several sizes; each is made when it is first asked for.

    Test workers that share the folder share the worlds: the first that asks makes one, the others wait for it.

    Args:
        folder: where the processes work.
        modules: whose cells.
        kind: see run_cells.
    """

    def __init__(self, folder: Path, modules: Sequence[str], kind: str) -> None:
        self._folder = folder
        self._modules = modules
        self._kind = kind
        self._told: dict[int, Told] = {}

    def __getitem__(self, size: int) -> Told:
        if size not in self._told:
            self._told[size] = _Failed()  # unless it works out
            folder = self._folder / f"{self._kind}-{size}"
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("w") as lock:
                wait_until(lambda: _locked(lock), f"the worker that makes {folder}", seconds=300.0)
                self._told[size] = self._made(folder, size)
        return self._told[size]

    def _made(self, folder: Path, size: int) -> Told:
        made = folder / "made"
        if made.exists():
            return _read(made, size)
        ranks = Ranks(folder / secrets.token_hex(4))
        ranks.folder.mkdir()
        try:
            told = run_cells(ranks, self._modules, size, self._kind)
        finally:
            ranks.end()
        ranks.folder.rename(made)
        return told


def _locked(file: IO[str]) -> bool:
    """Lock a file for this process, until it is closed, unless somebody else has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cells_of(modules: Sequence[str], size: int) -> dict[str, Cell]:
    """Return the cells of some modules that make sense in a world of this size, by module and name."""
    return {
        f"{module.rpartition('.')[2]}.{name}": cell
        for module in modules
        for name, cell in importlib.import_module(module).cell.of(size).items()
    }


def main(rank: int, size: int, folder: Path, kind: str, modules: Sequence[str]) -> None:
    """Be a rank: run all cells on each side and write down what came."""
    torch.set_num_threads(1)
    sides = KINDS[kind](rank, size, folder)
    joined = torch.distributed.is_initialized()
    if joined:
        between = torch.distributed.new_group(backend="gloo", timeout=2 * TIMEOUT)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for name, cell in cells_of(modules, size).items():
        outcomes[name] = {}
        for side, dist in sides.items():
            if cell.sides is not None and side not in cell.sides:
                continue
            outcomes[name][side] = outcome(cell, dist, rank, size)
            if joined:
                torch.distributed.barrier(between)  # so that no receive from any rank gets a later cell's message
    if joined:
        torch.distributed.destroy_process_group()
    if rankmesh.is_initialized():
        rankmesh.destroy_process_group()
    (folder / f"outcomes-{rank}").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
