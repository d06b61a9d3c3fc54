"""Hosts and processes of all ranks of a world: a table that every member gets, so it has few bytes a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rankmesh_agent.wire.fields import Integer


class Process(NamedTuple):
    """The process of a rank: host, pid, and a number of the host, equal for ranks that can share memory alone."""

    host: str
    number: int
    pid: int


@dataclass
class HostTable:
    """Hosts and processes of all ranks, as columns, which compress well.

    Ranks that follow one another on one host are a run.

    Attributes:
        hosts: host name of each run.
        steps: the number of each run's host, less that of the run before: 1 where each host has one run.
        sizes: number of ranks of each run.
        pids: process id of each rank, less that of the rank before in its run.
    """

    hosts: list[str] = field(default_factory=list)
    steps: list[Integer] = field(default_factory=list)
    sizes: list[Integer] = field(default_factory=list)
    pids: list[Integer] = field(default_factory=list)

    @classmethod
    def of(cls, processes: Iterable[Process]) -> HostTable:
        """Return the table of processes, by rank."""
        table, before = cls(), Process("", -1, 0)
        for process in processes:
            if process[:2] != before[:2]:
                table.hosts.append(process.host)
                table.steps.append(process.number - before.number)
                table.sizes.append(0)
                before = process._replace(pid=0)
            table.sizes[-1] += 1
            table.pids.append(process.pid - before.pid)
            before = process
        return table

    def processes(self) -> Iterator[Process]:
        """Return the processes, by rank."""
        number, steps = -1, iter(self.pids)
        for host, step, size in zip(self.hosts, self.steps, self.sizes, strict=True):
            number, pid = number + step, 0
            for _ in range(size):
                pid += next(steps)
                yield Process(host, number, pid)
