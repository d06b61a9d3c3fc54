"""The same code on torch.distributed with gloo, on rankmesh, and on torch.distributed with the backend ``rankmesh``.

A *cell* is a function ``cell(dist, rank, size, ...)``, written once against the torch API, which returns plain data and
tensors, or ``cell(group, rank, size, ...)``, which gets a group of torch.distributed. Processes run the cells of some
modules on every side and write down the outcomes: the values, or the exceptions.
gloo and rankmesh are compared in one process, which is in a job of each (the kind ``both``). torch.distributed has one
default group a process, so jobs whose default group is over the mesh have processes of their own (the kind ``over``),
which also run the cells of groups.
"""

from __future__ import annotations

import importlib
import itertools
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed

import rankmesh
import rankmesh.torch
from support.processes import Me, Ranks

TIMEOUT = timedelta(seconds=90)
SIZES = (1, 2, 3)
"""World sizes, in the order in which a process is in them."""


class Over:
    """torch.distributed with the mesh as its backend, wherever a cell names gloo.

    Two things differ from torch's module: ``monitored_barrier``, which torch has for gloo alone, is that of
    ``rankmesh.torch``, and ``dist is torch.distributed``, which means gloo to a cell, is false.
    """

    __name__ = "rankmesh.torch"
    monitored_barrier = staticmethod(rankmesh.torch.monitored_barrier)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def init_process_group(self, backend: Any = None, *arguments: Any, **options: Any) -> None:
        torch.distributed.init_process_group("rankmesh" if backend == "gloo" else backend, *arguments, **options)


KINDS: Mapping[str, Mapping[str, Any]] = {
    "both": {"gloo": torch.distributed, "rankmesh": rankmesh},
    "over": {"over": Over()},
}
"""The sides of each kind of process, in jobs of their own."""


class Cell(NamedTuple):
    """One piece of code to run on several sides.

    Attributes:
        name: its function's name, and its arguments.
        function: the code.
        arguments: passed besides the library or group, the rank and the world size.
        sizes: world sizes in which it makes sense.
        sides: the sides that it is run on; None for all.
        in_groups: whether it gets a group, over the mesh or gloo's, instead of a library.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    sizes: tuple[int, ...]
    sides: tuple[str, ...] | None
    in_groups: bool

    def __call__(self, dist: Any, rank: int, size: int) -> Any:
        return self.function(dist, rank, size, **self.arguments)


class Outcome(NamedTuple):
    """The outcome of a cell at one rank on one side.

    Attributes:
        value: the value as text, exact; None if there was an exception.
        error: the names of the exception's classes, from its own up to the builtin ones; None if there was none.
        text: the exception's message.
        seconds: duration.
    """

    value: str | None
    error: list[str] | None
    text: str
    seconds: float

    def __str__(self) -> str:
        return str(self.value) if self.error is None else f"{self.error[0]}: {self.text}"


Outcomes = dict[int, dict[str, list[dict[str, Outcome]]]]
"""By world size, by the cell's name and by rank: the outcome on each side."""


class Cells:
    """The cells of a module, in order; an instance decorates the functions."""

    def __init__(self, *, in_groups: bool = False) -> None:
        self.found: dict[str, Cell] = {}
        self._in_groups = in_groups

    def __call__(
        self, *, sizes: tuple[int, ...] = (1, 2, 3), sides: tuple[str, ...] | None = None, **arguments: Any
    ) -> Callable[..., Any]:
        """Make a cell of a function, or one for each combination of the lists that ``arguments`` are."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for values in itertools.product(*arguments.values()):
                words = "-".join(map(str, values))
                name = f"{function.__name__}[{words}]" if words else function.__name__
                assert name not in self.found, f"there are two cells {name}"
                given = dict(zip(arguments, values, strict=True))
                self.found[name] = Cell(name, function, given, sizes, sides, self._in_groups)
            return function

        return add


def cells_of(modules: Sequence[str], size: int) -> dict[str, Cell]:
    """Return the cells of some modules that make sense in a world of this size, by module and name."""
    return {
        f"{module.rpartition('.')[2]}.{name}": cell
        for module in modules
        for name, cell in importlib.import_module(module).cell.found.items()
        if size in cell.sizes
    }


def outcome(call: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call something and return its outcome."""
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
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


def run_cells(ranks: Ranks, modules: Sequence[str]) -> Outcomes:
    """Run the cells of some modules in worlds of all sizes on all sides."""
    secret = {"RANKMESH_TOKEN": "a secret"}  # so that objects are pickled, as in torch
    started = [ranks.start(be_a_rank, max(SIZES), env=secret, kind=kind, modules=modules) for kind in KINDS]
    found: Outcomes = {}
    for kind, processes in zip(KINDS, started, strict=True):
        ranks.wait(processes)
        for rank, process in enumerate(processes):
            ours = [line for line in process.stderr.splitlines() if ".cpp:" not in line]  # the rest is torch's own log
            assert (process.code, ours) == (0, []), ranks.transcript()
            for size, by_name in json.loads(outcomes_file(ranks.folder, kind, rank).read_text()).items():
                for name, sides in by_name.items():
                    by_rank = found.setdefault(int(size), {}).setdefault(name, [{} for _ in range(int(size))])
                    by_rank[rank] |= {side: Outcome(*each) for side, each in sides.items()}
    return found


def outcomes_file(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"outcomes-{kind}-{rank}"


def outcomes_in_a_world(kind: str, rank: int, size: int, folder: Path, modules: Sequence[str]) -> Iterator[Any]:
    """Be a rank of a world of every side, and run all cells."""
    sides = KINDS[kind]
    for name, dist in sides.items():
        method = f"file://{folder}/store-{name}-{size}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=TIMEOUT)
    groups = {"over": torch.distributed.group.WORLD}
    if kind == "over":
        groups["gloo"] = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT)
    between = torch.distributed.new_group(backend="gloo", timeout=2 * TIMEOUT)
    for name, cell in cells_of(modules, size).items():
        if cell.in_groups and kind != "over":
            continue
        found = {}
        for side, dist in (groups if cell.in_groups else sides).items():
            if cell.sides is None or side in cell.sides:
                found[side] = outcome(cell.__call__, dist, rank, size)
                torch.distributed.barrier(between)  # so that no receive from any rank gets a later cell's message
        yield name, found
    torch.distributed.destroy_process_group()
    if rankmesh.is_initialized():
        rankmesh.destroy_process_group()


def be_a_rank(me: Me, kind: str, modules: Sequence[str]) -> None:
    """Be a rank of all worlds that have it."""
    torch.set_num_threads(1)
    worlds = [size for size in SIZES if me.rank < size]
    outcomes = {size: dict(outcomes_in_a_world(kind, me.rank, size, me.folder, modules)) for size in worlds}
    outcomes_file(me.folder, kind, me.rank).write_text(json.dumps(outcomes))
