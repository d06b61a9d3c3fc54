"""docs/fault-tolerance.md: its scripts go on without a dead rank, or with a new one; what it names exists."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from support.processes import Ranks, free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fault-tolerance.md").read_text()
KILLED = """
import os, signal
import rankmesh as dist
calls, all_reduce = 0, dist.all_reduce
def counted(*arguments):
    global calls
    calls += 1
    if (os.environ.get("RANK"), calls) in {deaths}:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(*arguments)
dist.all_reduce = counted
exec({script!r})
print("done", step, weights.round(6).tolist(), flush=True)
"""


SHRINKING, REPLACING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DONE = "done 1000 [-100.0, -100.0, -100.0, -100.0]"


@pytest.mark.processes
def test_the_script_goes_on_without_the_ranks_that_die(ranks: Ranks) -> None:
    deaths = {("0", 100), ("3", 500)}
    (options,) = re.findall(r"rankmesh run (.*) train\.py", PAGE)
    path = ranks.folder / "train.py"
    path.write_text(KILLED.format(script=SHRINKING, deaths=deaths))
    started = ranks.command("-m", "rankmesh.run", *options.split(), str(path), name="job")
    ranks.wait([started])
    assert started.code == 137, ranks.transcript()
    assert started.stdout.count(DONE) == 4 - len(deaths), ranks.transcript()


@pytest.mark.processes
def test_the_script_goes_on_with_others_in_their_place(ranks: Ranks) -> None:
    deaths = {("0", 100), ("3", 100)}
    path, port = ranks.folder / "train.py", free_port()
    path.write_text(KILLED.format(script=REPLACING, deaths=deaths))
    own = {"RANKMESH_TOKEN": "the job's secret"}
    gateway = ranks.command("-m", "rankmesh_gateway", "--port", str(port), name="gateway", **own)
    place = {"RANKMESH_GATEWAY": f"http://127.0.0.1:{port}", **own}
    first = [ranks.command(str(path), name="rank", RANK=str(rank), WORLD_SIZE="4", **place) for rank in range(4)]
    new = [ranks.command(str(path), name="new", RANKMESH_JOIN="1", **place) for _ in deaths]
    ranks.wait([*first, *new])
    assert sorted(rank.code for rank in first) == [-9] * len(deaths) + [0] * (4 - len(deaths)), ranks.transcript()
    assert [rank.code for rank in new] == [0] * len(deaths), ranks.transcript()
    assert all(DONE in rank.stdout for rank in [*first, *new] if rank.code == 0), ranks.transcript()
    gateway.kill(signal.SIGTERM)
    ranks.wait([gateway])


def test_files_and_pages_that_it_names_are_there() -> None:
    for path in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
    for path in re.findall(r"(examples/[\w/]+\.py)", PAGE):
        assert (ROOT / path).exists(), path
