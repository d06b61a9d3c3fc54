"""rankmesh.run: a function as ranks, from scripts and from notebooks. The programs that call it are processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.processes import Ranks, wait_until

import rankmesh as dist

processes = pytest.mark.processes

SCRIPT = """
import os, time
import numpy as np
import rankmesh as dist
from pathlib import Path

for name in ("OMP_NUM_THREADS", "RANKMESH_JOB"):  # the tests'
    os.environ.pop(name, None)

def total(first, second):
    dist.init_process_group()
    array = np.full(3, first * (dist.get_rank() + second))
    dist.all_reduce(array)
    names = ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "RANKMESH_JOB")
    return dist.get_rank(), array, [os.environ.get(name) for name in names]

def fail(how):
    dist.init_process_group()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("no more data")
        os._exit(0 if how == "exit" else 3)
    if how != "exit":
        dist.all_reduce(np.ones(3))

def stick(folder):
    dist.init_process_group()
    while dist.get_rank() == 1 and not Path(folder, "go").exists():
        time.sleep(0.1)
    dist.all_reduce(np.ones(3))
    return "went on"
"""

SAYS = {
    "results": """
    print([(rank, *array.tolist(), *variables[:2]) for rank, array, variables in dist.run(total, 3, 2.0, 1)])
    print(os.environ.get("OMP_NUM_THREADS"), os.environ.get("RANK"))
    from rankmesh.run import main
    import rankmesh
    (one,) = rankmesh.run(total, 1, 1.0, 0)
    print(one[2][2].startswith("total-"))
""",
    "failures": """
    for how in ("raise", "exit", "exit 3"):
        try:
            dist.run(fail, 3, how)
        except Exception as error:
            print(type(error).__name__, error, sep=": ")
""",
    "a stuck job": """
    job = dist.run(stick, 3, ".", block=False)
    while "not come" not in job.verdict():
        time.sleep(0.1)
    try:
        job.result(timeout=0)
    except TimeoutError as error:
        print(error)
    print(job)
    print(job._repr_html_())
    Path("go").touch()
    print(job.result(), job.result(60), job)
    Path("go").unlink()
    job = dist.run(stick, 2, ".", block=False)
    job.stop()
    print(job.verdict())
""",
}


def script(ranks: Ranks, name: str) -> str:
    path = ranks.folder / "script.py"
    path.write_text(f"{SCRIPT}\nif __name__ == '__main__':\n{SAYS[name]}")
    started = ranks.command(str(path), name="script")
    ranks.succeed([started])
    wait_until(lambda: not ranks.left(), "the end of multiprocessing's resource tracker")
    return started.stdout


@processes
def test_the_results_come_in_the_order_of_the_ranks(ranks: Ranks) -> None:
    rows, environment, named = script(ranks, "results").splitlines()
    assert rows == str([(rank, 12.0, 12.0, 12.0, "1", "3") for rank in range(3)])
    assert environment == "None None", "the caller's environment is as it was"
    assert named == "True"


@processes
def test_an_error_names_the_rank_and_its_line(ranks: Ranks) -> None:
    said = script(ranks, "failures")
    raised, exited, code = re.split(r"\n(?=RuntimeError|ProcessExited)", said.strip())
    assert re.match(r"ProcessRaisedException: rank 1 \(pid \d+\) raised at script.py:21 in fail:\n", raised)
    assert raised.rstrip().endswith('raise ValueError("no more data")\nValueError: no more data')
    assert re.fullmatch(r"RuntimeError: rank 1 of job fail-\w+ exited before its function returned", exited)
    assert re.fullmatch(r"ProcessExitedException: rank 1 \(pid \d+\) terminated with exit code 3", code)


@processes
def test_a_stuck_job_shows_which_rank_holds_it_up(ranks: Ranks) -> None:
    said = script(ranks, "a stuck job")
    held = r"rank 1 has not come to all_reduce #1 for .*; it is at script.py:2[89].*; ranks 0, 2 wait at script.py:30"
    assert re.match(rf"after 0 s ranks of job stick-\w+ still run: {held}", said)
    assert len(re.findall(held, said)) == 3, "in the error, in the text and in HTML"
    waits = r"alive  all_reduce\(float64\[3\], SUM\) #1, script.py:30 in stick"
    assert len(re.findall(rf"^  +[02] +\d+  {waits}$", said, re.MULTILINE)) == 2, said
    assert re.search(r"<tr><td>1</td><td>\d+</td><td>alive</td><td>script.py:2[89] in stick", said), said
    table = said.partition("</pre>\n")[2].split("all ranks have ended\n")[0]
    assert table.startswith("['went on', 'went on', 'went on'] ['went on', 'went on', 'went on'] Job stick-"), said
    assert len(re.findall(r"^  +\d +\d+  ended$", table, re.MULTILINE)) == 3, said


INTERACTIVE = """
import linecache
import numpy as np
import rankmesh as dist

CELL = '''
class Result:
    def __init__(self, total):
        self.total = total

def add_up(first):
    dist.init_process_group()
    array = np.full(3, first.total)
    dist.all_reduce(array)
    if array[0] > 10:
        raise ValueError("too much")
    return Result(float(array[0]))
'''
linecache.cache["/tmp/ipykernel_1/2.py"] = len(CELL), None, CELL.splitlines(True), "/tmp/ipykernel_1/2.py"
exec(compile(CELL, "/tmp/ipykernel_1/2.py", "exec"))
print([type(each) is Result and each.total for each in dist.run(add_up, 2, Result(2.0))])
dist.run(add_up, 2, Result(7.0))
"""


@processes
def test_a_function_and_a_class_of_a_notebook(ranks: Ranks) -> None:
    pytest.importorskip("cloudpickle")
    done = ranks.command("-c", INTERACTIVE, name="interactive")
    ranks.wait([done])
    wait_until(lambda: not ranks.left(), "the end of multiprocessing's resource tracker")
    assert (done.code, done.stdout) == (1, "[4.0, 4.0]\n"), done
    assert re.search(r"raised at 2.py:11 in add_up:", done.stderr)
    assert '    raise ValueError("too much")\n' in done.stderr, "the source of the cell"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, 1), TypeError, "fn must be a function, got int"),
        ((print, 0), ValueError, "nprocs must be at least 1, got 0"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        dist.run(*arguments)
