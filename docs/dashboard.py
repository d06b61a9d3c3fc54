"""Writes docs/dashboard.png: the dashboard of a gateway, with a job that trains. ``make dashboard-screenshot`` runs it.

A gateway, two standalone agents and four ranks that average gradients run on this machine for a while;
then one rank is stopped (SIGSTOP), so that the picture shows how the others wait for it. Needs Chromium.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PICTURE = Path(__file__).with_name("dashboard.png")
RANKS = 4
AGENTS = 2
SIZE = {"width": 1200, "height": 880}
COLOURS = 256
TRAINING_SECONDS = 35.0
STOPPED_SECONDS = 4.5
DEADLINE = 60.0
TRAINING = """
import time
import numpy as np
import rankmesh as dist

dist.init_process_group()
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
gradients = np.ones(250_000, np.float32)
while True:
    time.sleep(0.01 + 0.005 * np.sin(time.time() / 5))  # as if it computed them
    dist.all_reduce(gradients, dist.ReduceOp.AVG)
    dist.all_reduce(gradients[:1000], dist.ReduceOp.AVG, group=halves[dist.get_rank() // 2])
"""

sys.path.insert(0, str(ROOT / "tests"))


@contextlib.contextmanager
def running(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, killed at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **variables}
    # The errors of ranks whose peers are killed at the end are of no use.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def start_gateway(stack: contextlib.ExitStack) -> str:
    """Start the gateway; return its URL."""
    gateway = stack.enter_context(running("-m", "rankmesh_gateway", "--port", "0"))
    assert gateway.stdout is not None
    line = gateway.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, f"the gateway says {line!r}"
    return found[0]


def start_ranks(stack: contextlib.ExitStack, url: str, folder: Path) -> subprocess.Popen[str]:
    """Start agents and ranks; return the last rank's process."""
    for number in range(AGENTS):
        options = ["--gateway", url, "--port", "0", "--name", f"agent-{number}"]
        stack.enter_context(running("-m", "rankmesh_agent", *options))
    script = folder / "train.py"
    script.write_text(TRAINING)
    host, _, port = url.removeprefix("http://").partition(":")
    place = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "RANKMESH_JOB": "digits"}
    ranks = [stack.enter_context(running(str(script), **place, RANK=str(rank))) for rank in range(RANKS)]
    return ranks[-1]


def take(path: Path) -> None:
    """Run the cluster and take the picture."""
    from playwright.sync_api import Page
    from support.browser import chromium

    def wait(page: Page, selector: str, text: str) -> None:
        page.locator(selector, has_text=text).first.wait_for(timeout=1000 * DEADLINE)

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = start_gateway(stack)
        page = stack.enter_context(chromium()).new_page(viewport=SIZE, color_scheme="light")  # type: ignore[arg-type]
        page.goto(url, timeout=1000 * DEADLINE)
        wait(page, "#connection", "live")
        last = start_ranks(stack, url, folder)
        wait(page, "#count-ranks-note", f"{RANKS} alive")
        page.wait_for_timeout(1000 * TRAINING_SECONDS)
        last.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        wait(page, "#hosts .state", "suspect")
        wait(page, "#inflight .missing", f"missing {RANKS - 1}")
        page.wait_for_timeout(max(0.0, 1000 * (stopped + STOPPED_SECONDS - time.monotonic())))
        page.screenshot(path=path)


def shrink(path: Path) -> None:
    """Write the picture with fewer colours; it has few."""
    from PIL import Image

    picture: Any = Image.open(path)
    picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    take(PICTURE)
    shrink(PICTURE)
    print(f"{PICTURE} ({PICTURE.stat().st_size} bytes)")
