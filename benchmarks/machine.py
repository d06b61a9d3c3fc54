"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path

import numpy as np


def describe() -> dict[str, str]:
    """Return what a reader needs to know of this machine, in the order to show it."""
    return {
        "processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
    }


class Bystanders:
    """How much of the machine others took since this was made: the honesty of the figures.

    Counted is the processor time that neither this process nor a child it has waited for used, and what the hypervisor
    withheld.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._others = busy_seconds() - own_seconds()

    def cores(self) -> float:
        """Return how many cores were kept busy by others, on average."""
        return max(0.0, (busy_seconds() - own_seconds() - self._others) / (time.monotonic() - self._began))


def busy_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Return how long the processors were not idle since the machine started, added up."""
    user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, stat.read_text().split(None, 9)[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the processor time of this process and of the children, and theirs, that have been waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, or its architecture where the kernel does not tell the name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
