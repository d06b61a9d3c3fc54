"""The results as a Markdown page, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.peers import Peer
from benchmarks.plan import PROTOTYPES, Cell
from benchmarks.run import Results
from benchmarks.tables import microseconds, ratio, size, table

_READING = (
    "Times are medians of all timings. Ratios say how many times as long the other one takes, and are medians of the "
    "rounds' ratios: within a round the two were measured a moment apart, while over minutes the speed of a virtual "
    "machine changes. So they are not the quotients of the times beside them."
)

WITHIN = 2.0
"""How many times the prototype's time RankMesh may take."""


@dataclass(frozen=True)
class Circumstances:
    """What is not in the results themselves.

    Attributes:
        machine: what they were measured on, name and description.
        date: when it was finished.
        left_out: a line for each peer that was not measured.
    """

    machine: Mapping[str, str]
    date: datetime
    left_out: Sequence[str] = ()


def page(results: Results, circumstances: Circumstances) -> str:
    """Return the whole page."""
    sections = [
        "# Benchmarks\n\nMade by `make bench` (`python -m benchmarks`); do not edit.",
        _setting(results, circumstances),
        _method(results),
        *circumstances.left_out,
        f"## Microseconds a call\n\n{_READING}",
        *(f"### {ranks} ranks\n\n{medians(results, ranks)}" for ranks in results.effort.ranks),
        _prototypes(results),
        f"## All figures\n\n{details(results)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def medians(results: Results, ranks: int) -> str:
    """Return the table of all peers' medians, and of the others' ratios to RankMesh."""
    ours = [peer for peer in results.peers if peer.library == "rankmesh"]
    others = [peer for peer in results.peers if peer.library != "rankmesh"]
    pairs = [(other, our) for our in ours for other in others]
    headings = ["array", *(peer.title for peer in results.peers), *(_short(other, our) for other, our in pairs)]
    rows = []
    for nbytes in results.effort.sizes:
        cell = {peer.name: Cell(peer.name, ranks, nbytes) for peer in results.peers}
        times = [microseconds(results.summary(cell[peer.name]).median) for peer in results.peers]
        ratios = [ratio(results.ratio(cell[other.name], cell[our.name])) for other, our in pairs]
        rows.append([size(nbytes), *times, *ratios])
    return table(headings, rows)


def prototypes(results: Results) -> str:
    """Return the table of RankMesh beside the prototypes; empty when nothing can be compared."""
    rows = []
    for cell, prototype in PROTOTYPES.items():
        if cell not in results.turns:
            continue
        ours = results.summary(cell)
        low, high = microseconds(prototype.low), microseconds(prototype.high)
        at_best, usually = ours.least / prototype.middle, ours.median / prototype.middle
        rows.append(
            [
                _title(results, cell),
                str(cell.ranks),
                size(cell.nbytes),
                low if low == high else f"{low} to {high}",
                microseconds(ours.least),
                ratio(at_best),
                microseconds(ours.median),
                ratio(usually),
                "yes" if usually <= WITHIN else "at best" if at_best <= WITHIN else "no",
            ]
        )
    headings = ["", "ranks", "array", "prototype", "shortest", "ratio", "median", "ratio", f"within {WITHIN:g}x"]
    return table(headings, rows, texts=1) if rows else ""


def details(results: Results) -> str:
    """Return the table of everything that was measured."""
    rows = []
    for cell, turns in sorted(results.turns.items(), key=lambda item: (item[0].ranks, item[0].nbytes)):
        summary = results.summary(cell)
        rows.append(
            [
                _title(results, cell),
                str(cell.ranks),
                size(cell.nbytes),
                microseconds(summary.median),
                microseconds(summary.least),
                f"{microseconds(summary.lower)} to {microseconds(summary.upper)}",
                f"{sum(map(len, turns))} of {results.calls[cell]}",
            ]
        )
    headings = ["", "ranks", "array", "median", "shortest", "middle half", "timings of calls"]
    return table(headings, rows, texts=1)


def as_json(results: Results, circumstances: Circumstances) -> dict[str, Any]:
    """Return everything that was measured, for programs."""
    return {
        "date": circumstances.date.isoformat(timespec="seconds"),
        "machine": dict(circumstances.machine),
        "versions": results.versions,
        "cells": [
            {
                **cell._asdict(),
                **results.summary(cell)._asdict(),
                "calls": results.calls[cell],
                "turns": turns,
            }
            for cell, turns in results.turns.items()
        ],
    }


def _setting(results: Results, circumstances: Circumstances) -> str:
    versions = dict.fromkeys(results.versions[peer.name] for peer in results.peers)
    rows = [
        ["date", f"{circumstances.date:%Y-%m-%d %H:%M} UTC"],
        *([name, description] for name, description in circumstances.machine.items()),
        ["measured", ", ".join(versions)],
    ]
    return table(["", ""], rows, texts=2)


def _method(results: Results) -> str:
    effort = results.effort
    return (
        "What is timed is `all_reduce` of a float32 array in place, summed, as a user calls it from Python: "
        "`dist.all_reduce(array)`, torch's `dist.all_reduce(tensor)` on a CPU tensor, mpi4py's "
        "`COMM_WORLD.Allreduce(IN_PLACE, array)`. Ranks are processes on one machine, each peer's started by its own "
        "launcher (`rankmesh.run`, `torchrun`, `mpirun --oversubscribe --bind-to none`) with OMP_NUM_THREADS=1, "
        "and all peers' stay alive together, asleep while it is not their turn. "
        f"There are {effort.rounds} rounds; in each, for every size, the peers take turns, another one first in each "
        f"round. A turn is a check of the result (every element of it), calls to warm up, {effort.repetitions} "
        f"timings, and the check again. A timing is of as many calls as take {1e3 * effort.seconds:g} ms, the same "
        "number on all ranks, and counts for the slowest rank. More ranks than cores share the cores, as they would "
        "in a test on a laptop."
    )


def _prototypes(results: Results) -> str:
    compared = prototypes(results)
    return compared and (
        "## Beside the prototypes\n\n"
        "The prototypes are the throwaway programs behind the design: the same loops without checks, timeouts or a "
        "public API. Their figures are fixed, the best of 3 timings on a machine with two cores; where they are a "
        f"range, ratios are to its middle. Within {WITHIN:g}x is 'yes' when the median is, 'at best' when only the "
        "shortest timing is, which is what the prototypes' figures are.\n\n" + compared
    )


def _title(results: Results, cell: Cell) -> str:
    return next(peer.title for peer in results.peers if peer.name == cell.peer)


def _short(other: Peer, our: Peer) -> str:
    return f"{other.title} / {our.title.removeprefix('RankMesh, ')}"
