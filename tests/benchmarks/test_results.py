"""What came out, its ratios, and its way through a file."""

from __future__ import annotations

import json

from support.made_up_run import run

from benchmarks.plan import Case, Cell
from benchmarks.results import Results, Run, latest

CASE = Case("all_reduce", 2, 4)
OURS, THEIRS = Cell(CASE, "ours"), Cell(CASE, "theirs")


def test_ratios_are_of_turns_in_the_same_round() -> None:
    results = Results()
    results.turns[OURS] = [[10, 11, 12], [100], [100]]  # twice as fast whatever the machine does
    results.turns[THEIRS] = [[20, 22, 90], [200], [20_000]]
    assert results.ratio(THEIRS, OURS) == 2
    assert results.ratio(Cell(CASE, "nobody's"), OURS) is None


def test_a_run_comes_back_from_its_file() -> None:
    made = run()
    read = Run.from_json(json.loads(json.dumps(made.as_json())))
    assert read.as_json() == made.as_json()
    assert read.results.cases() == made.results.cases()
    assert read.results.ratio(Cell(CASE, "gloo"), Cell(CASE, "rankmesh-shm")) == 60


def test_the_latest_figures_are_those_of_the_last_run_that_has_them() -> None:
    first, second = run(), run(2)
    only_first, both = Cell(CASE, "gloo"), Cell(CASE, "rankmesh-shm")
    del second.results.turns[only_first]
    results = latest([first, second])
    assert results.turns[only_first] == first.results.turns[only_first]
    assert results.turns[both] == second.results.turns[both] != first.results.turns[both]
    assert second.results.turns.keys() < results.turns.keys()
