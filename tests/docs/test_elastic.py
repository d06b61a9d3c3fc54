"""docs/elastic.md: its script goes on without a rank that dies, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import Ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "elastic.md").read_text()
KILLED = """
import os, signal
import rankmesh as dist
calls, all_reduce = 0, dist.all_reduce
def counted(*arguments):
    global calls
    calls += 1
    if (os.environ["RANK"], calls) in {deaths}:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(*arguments)
dist.all_reduce = counted
exec({script!r})
print("done", step, weights.round(6).tolist(), flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("deaths", [{("0", 100)}, {("1", 100), ("3", 100)}, {("2", 100), ("1", 500)}])
def test_the_script_goes_on_without_the_ranks_that_die(ranks: Ranks, deaths: set[tuple[str, int]]) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (options,) = re.findall(r"rankmesh run (.*) train\.py", PAGE)
    path = ranks.folder / "train.py"
    path.write_text(KILLED.format(script=script, deaths=deaths))
    started = ranks.command("-m", "rankmesh.run", *options.split(), str(path), name="job")
    ranks.wait([started])
    assert started.code == 137, ranks.transcript()
    assert started.stdout.count("done 1000 [-100.0, -100.0, -100.0, -100.0]") == 4 - len(deaths), ranks.transcript()


def test_files_and_pages_that_it_names_are_there() -> None:
    for path in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
    for path in re.findall(r"(examples/[\w/]+\.py)", PAGE):
        assert (ROOT / path).exists(), path
