"""A whole run: operations, stores, training steps, joins and what idle ranks cost, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from benchmarks import ddp, footprint, gpu, join, mpi_overhead, stores
from benchmarks.machine import Bystanders, describe
from benchmarks.peers import Peer, available
from benchmarks.plan import Case, Cell, Effort
from benchmarks.results import Results, Run
from benchmarks.run import Say, run
from benchmarks.team import PeerFailedError

JOINS = {"launcher": (4, 8, 16), "by hand": (4,), "threads": (16, 32, 64)}
"""Worlds that are started, by how: as processes where they fit, as threads beyond."""
IDLE_RANKS = 4


@dataclass(frozen=True)
class Session:
    """What to measure, and how thoroughly.

    Attributes:
        cases: operations, with their ranks and sizes.
        effort: for each case.
        store_rounds: turns of each store; 0: leave stores out.
        join_rounds: how often worlds are started; 0: leave joins and idle ranks out.
        ddp_rounds: turns of each backend of training steps, by the number of ranks.
        mpi_rounds: turns of backend mpi and of bare mpi4py; 0: leave them out.
        gpus: what to measure on GPUs; None: leave them out.
    """

    cases: Sequence[Case]
    effort: Callable[[Case], Effort]
    store_rounds: int = 0
    join_rounds: int = 0
    ddp_rounds: Mapping[int, int] = field(default_factory=dict)
    mpi_rounds: int = 0
    gpus: gpu.Plan | None = None

    def measure(self, peers: Sequence[Peer], say: Say) -> Run:
        """Measure all of it.

        Raises:
            PeerFailedError: a peer did not start, died, gave a wrong result or took too long, or there is none.
        """
        began, bystanders = datetime.now(UTC), Bystanders()
        clock = time.monotonic()
        results = Results()
        here, left_out = available(peers if self.cases else ())
        here_stores, no_stores = available(stores.PEERS if self.store_rounds else ())
        here_ddp, no_ddp = available(ddp.PEERS if self.ddp_rounds else ())
        here_mpi, no_mpi = available([mpi_overhead.PEER] if self.mpi_rounds else ())
        no_gpu = gpu.missing() if self.gpus else []
        left_out += [*no_stores, *no_ddp, *no_mpi, *no_gpu]
        for line in left_out:
            say(line)
        if self.cases and not here:
            raise PeerFailedError(f"There is nobody to measure. {' '.join(left_out)}")
        if self.cases:
            run(here, self.cases, self.effort, results, say)
        if here_stores:
            stores.measure(here_stores, self.store_rounds, results, say)
        if here_ddp:
            ddp.measure(here_ddp, self.ddp_rounds, results, say)
        if here_mpi:
            mpi_overhead.measure(self.mpi_rounds, results, say)
        machine = describe()
        if self.gpus and not no_gpu:
            left_out += gpu.measure(self.gpus, results, say)
            machine |= gpu.describe()
        if self.join_rounds:
            _joins(self.join_rounds, results, say)
        others = f"{bystanders.cores():.2f} cores, on average, while this was measured"
        minutes = (time.monotonic() - clock) / 60
        return Run(results, {**machine, "others used": others}, began, minutes, left_out)


def _joins(rounds: int, results: Results, say: Say) -> None:
    """Measure joins and idle ranks."""
    for way, ranks in JOINS.items():
        for (_, size), starts in join.measure(ranks, [way], rounds, say=say).items():
            cell = Cell(Case(f"join_{way.replace(' ', '_')}", size, 0), "rankmesh")
            for start in starts:
                results.add(cell, [1e6 * start.seconds])
    say(f"{IDLE_RANKS} ranks: idle")
    world = footprint.measure(IDLE_RANKS)
    most = max(world.beyond(rank).resident for rank in range(IDLE_RANKS))
    results.add(Cell(Case("rss_mb", IDLE_RANKS, 0), "rankmesh"), [most / 1e6])
    busiest = max(rank.processor for rank in world.ranks)
    results.add(Cell(Case("idle_percent", IDLE_RANKS, 0), "rankmesh"), [100 * busiest])
