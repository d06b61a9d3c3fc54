"""The machine that figures were measured on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import numpy as np


def describe() -> dict[str, str]:
    """Return what a reader needs to know of this machine, in the order to show it."""
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }


def _processor() -> str:
    """Return the processor's name, or its architecture where the kernel does not name it."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
