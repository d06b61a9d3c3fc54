"""The same code on torch.distributed with gloo and on rankmesh, in ranks that are in a job of each.

A *cell* is a function ``cell(dist, rank, size, ...)``, written once against the torch API, which returns plain data and
tensors. A process a rank runs every cell of some modules with each library as ``dist`` and writes down what came: the
value, or the exception. ``python -m support.sides RANK SIZE FOLDER joined|apart MODULE...`` is such a process.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed

import rankmesh
from support.processes import Ranks

SIDES = {"gloo": torch.distributed, "rankmesh": rankmesh}
TIMEOUT = timedelta(seconds=30)


class Cell(NamedTuple):
    """One piece of code to run on both sides.

    Attributes:
        name: its function's name, and its arguments.
        function: the code.
        arguments: what it gets besides the library, the rank and the world's size.
        sizes: world sizes in which it makes sense.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    sizes: tuple[int, ...]

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

    def __call__(self, *, sizes: tuple[int, ...] = (1, 2, 3), **arguments: Any) -> Callable[..., Any]:
        """Make a cell of a function, or one for each combination of the lists that ``arguments`` are."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for values in itertools.product(*arguments.values()):
                words = "-".join(map(str, values))
                name = f"{function.__name__}[{words}]" if words else function.__name__
                assert name not in self.found, f"there are two cells {name}"
                self.found[name] = Cell(name, function, dict(zip(arguments, values, strict=True)), sizes)
            return function

        return add

    def of(self, size: int) -> dict[str, Cell]:
        """Return the cells that make sense in a world of this size."""
        return {name: cell for name, cell in self.found.items() if size in cell.sizes}


def join(rank: int, size: int, folder: Path) -> None:
    """Make this process a rank of a job of gloo's, and of one of rankmesh's."""
    store = torch.distributed.FileStore(str(folder / "gloo"), size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    rankmesh.init_process_group(
        "gloo", init_method=f"file://{folder}/rankmesh", rank=rank, world_size=size, timeout=TIMEOUT
    )


def leave() -> None:
    """End both jobs at this rank."""
    for dist in SIDES.values():
        if dist.is_initialized():
            dist.destroy_process_group()


def outcome(call: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call something and return what came of it."""
    began = time.monotonic()
    value, error, text = None, None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each library warns in its own words
            value = repr(plain(call(*arguments)))
    except Exception as caught:
        error, text = [kind.__name__ for kind in type(caught).__mro__], str(caught)
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


def run_cells(ranks: Ranks, modules: Sequence[str], size: int, *, joined: bool = True) -> Told:
    """Run the cells of some modules in ``size`` processes.

    Args:
        ranks: starts them.
        modules: their names; the cells of each are ``module.cell``.
        size: world size.
        joined: whether the processes are in a job of each library's.
    """
    arguments = [str(size), str(ranks.folder), "joined" if joined else "apart", *modules]
    started = [ranks.command("-m", "support.sides", str(rank), *arguments, name=f"rank-{rank}") for rank in range(size)]
    ranks.wait(started, seconds=120.0)
    for rank in started:
        ours = [line for line in rank.stderr.splitlines() if ".cpp:" not in line]  # the rest is torch's own log
        assert (rank.code, ours) == (0, []), ranks.told()
    by_rank = [json.loads((ranks.folder / f"outcomes-{rank}").read_text()) for rank in range(size)]
    return {
        name: [{side: Outcome(*told) for side, told in rank[name].items()} for rank in by_rank] for name in by_rank[0]
    }


class _Failed(Told):
    """What a world tells that failed."""

    def __missing__(self, name: str) -> None:
        raise AssertionError("the processes failed: see the first test that wanted to know from them")


class Worlds:
    """What came of the cells in worlds of several sizes; each is made when it is first asked for.

    Args:
        folder: where the processes work.
        modules: whose cells.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self._folder = folder
        self._modules = modules
        self._told: dict[int, Told] = {}

    def __getitem__(self, size: int) -> Told:
        if size not in self._told:
            self._told[size] = _Failed()  # unless it works out
            ranks = Ranks(self._folder / str(size))
            ranks.folder.mkdir()
            try:
                self._told[size] = run_cells(ranks, self._modules, size)
            finally:
                ranks.end()
        return self._told[size]


def cells_of(modules: Sequence[str], size: int) -> dict[str, Cell]:
    """Return the cells of some modules that make sense in a world of this size, by module and name."""
    return {
        f"{module.rpartition('.')[2]}.{name}": cell
        for module in modules
        for name, cell in importlib.import_module(module).cell.of(size).items()
    }


def main(rank: int, size: int, folder: Path, joined: bool, modules: Sequence[str]) -> None:
    """Be a rank: run all cells on both sides and write down what came."""
    torch.set_num_threads(1)
    if joined:
        join(rank, size, folder)
        between = torch.distributed.new_group(timeout=2 * TIMEOUT)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for name, cell in cells_of(modules, size).items():
        outcomes[name] = {}
        for side, dist in SIDES.items():
            outcomes[name][side] = outcome(cell, dist, rank, size)
            if joined:
                torch.distributed.barrier(between)  # so that no receive from any rank gets a later cell's message
    if joined:
        leave()
    (folder / f"outcomes-{rank}").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "joined", sys.argv[5:])
