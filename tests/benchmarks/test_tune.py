"""Where the table of algorithms switches."""

from __future__ import annotations

import math

import pytest

from benchmarks import tune
from benchmarks.tune import Row, Sample, merged, rows, switching, written
from rankmesh_agent.collectives.thresholds import LIMITS
from rankmesh_agent.wire.ops import OpType

THREE = [(100, "small"), (1000, "middle"), (math.inf, "large")]


def samples(*seconds: tuple[float, ...]) -> list[Sample]:
    return [Sample(10**power, each) for power, each in enumerate(seconds)]


def test_each_algorithm_is_taken_where_it_is_fastest() -> None:
    found = switching(THREE, samples((1, 2, 3), (1, 2, 3), (3, 2, 3), (math.inf, 2, 3), (math.inf, math.inf, 9)))
    assert found == {"small": 10, "middle": 1000}


def test_an_algorithm_that_is_never_fastest_is_never_taken() -> None:
    assert switching(THREE, samples((1, 2, 3), (1, 2, 3), (4, 3, 2))) == {"small": 10, "middle": -1}
    assert switching(THREE[1:], samples((1, 2), (1, 2))) == {"middle": 10}


def test_one_disturbed_sample_moves_no_limit() -> None:
    assert switching(THREE[1:], samples((1, 1.9), (500, 2), (1, 1.9), (1, 1.9), (3, 2))) == {"middle": 1000}


def test_what_was_found_replaces_the_same_row_and_ranks_only() -> None:
    before = {("A", "link"): {"small": {2: 5, 4: 6}, "gone": {2: 1}}, ("B", "link"): {"small": {2: 7}}}
    after = merged(before, {("A", "link"): {"small": {2: 50}}})
    assert after == {("A", "link"): {"small": {2: 50, 4: 6}}, ("B", "link"): {"small": {2: 7}}}


def test_the_file_is_read_back_as_it_was_written() -> None:
    wide = {**LIMITS, ("GATHER", "wide"): {f"algorithm_number_{n}": {2: n, 4: -1} for n in range(5)}}
    text = written(wide, "by a test")
    names: dict[str, object] = {}
    exec(text, names)
    assert names["LIMITS"] == wide
    assert "Measured: by a test." in text
    assert max(map(len, text.splitlines())) <= 120


def test_rows_without_a_choice_are_left_alone() -> None:
    keys = {row.key for row in rows()}
    assert {("ALL_REDUCE", "segment"), ("ALL_REDUCE", "link")} <= keys
    assert ("ALL_TO_ALL", "link") not in keys
    assert all(medium in tune.MEASURED_BY for _, medium in keys)


@pytest.mark.processes
def test_every_algorithm_of_a_row_is_measured_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "EFFORT", tune.Effort(rounds=1, repetitions=1, seconds=0.0005))
    said: list[str] = []
    row = Row(OpType.ALL_REDUCE, "segment")
    found = tune.tune([row], [2], [4096, 2 << 20], said.append)
    assert set(found[row.key]) == {name for _, name in row.algorithms[:-1]}
    assert all(name in said[0] for _, name in row.algorithms)
    small, large = said[0].splitlines()[-2:]
    assert "" not in [cell.strip() for cell in small.strip("|").split("|")]
    assert "" in [cell.strip() for cell in large.strip("|").split("|")]  # more than a slot


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--only", "NOTHING/link"])
    assert "'NOTHING/link' is none of" in capsys.readouterr().err
