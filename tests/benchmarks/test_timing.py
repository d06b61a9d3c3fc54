"""Operations and timings: contents that prove a result, worlds whose results are wrong, and real ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.processes import wait_until

from benchmarks import workers
from benchmarks.adapters import Adapter
from benchmarks.busy import BusyProcesses
from benchmarks.cases import QUICK, Case, Cell, Effort, cases, full
from benchmarks.implementations import IMPLEMENTATIONS, available
from benchmarks.operations import OPERATIONS
from benchmarks.patterns import difference, fill
from benchmarks.results import Results
from benchmarks.rounds import in_rounds, measure
from benchmarks.worker import timings
from benchmarks.workers import MeasurementError, WorkerGroup

SHM = IMPLEMENTATIONS["rankmesh-shm"]
TINY = Effort(rounds=2, least=2, repetitions=1, seconds=0.0005)
CASE = Case("all_reduce", 2, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [1, 6, 7 * 4096, 7 * 4096 + 5])
def test_a_pattern_proves_every_element_and_its_place(count: int, dtype: Any) -> None:
    array = np.zeros(count, dtype)
    for number in range(1, 9):  # the sum of eight ranks' patterns is exact
        part = np.empty(count, dtype)
        fill(part, number)
        array += part
    assert difference(array, 36) is None
    if count > 1:
        assert difference(np.roll(array, 1), 36) is not None
    array[-1] += 36
    assert f"element {count - 1} of {count}" in str(difference(array, 36))


def world(factor: float, spoiled_call: int = -1) -> tuple[Adapter, list[int]]:
    """Return rank 1 of three equal ranks: with a factor of 3 its sums are right, as 1 + 2 + 3 is 3 times 2."""
    made = []

    def all_reduce(array: np.ndarray) -> Callable[[], None]:
        def call() -> None:
            array[:] *= factor
            made.append(len(made))
            array[-1] += len(made) == spoiled_call

        return call

    return Adapter(1, 3, "Fake 1.0", {"barrier": lambda: lambda: None, "all_reduce": all_reduce}, lambda: None), made


def test_one_timing_a_repetition() -> None:
    seconds = timings(world(3)[0], "all_reduce", nbytes=400, calls=5, repetitions=4)
    assert len(seconds) == 4
    assert min(seconds) > 0
    assert len(timings(world(3)[0], "all_reduce", nbytes=400, calls=5, repetitions=4, clock="process_time")) == 4
    assert OPERATIONS["all_reduce"].for_bytes(world(3)[0], 1).inputs[0][0].size == 1


def test_wrong_results_are_errors_before_and_after_the_timings() -> None:
    with pytest.raises(ArithmeticError, match=r"all_reduce, rank 1 of 3: element 0 of 100 is 4\.0, not 6"):
        timings(world(2)[0], "all_reduce", nbytes=400, calls=1, repetitions=1)
    spoiled, made = world(3, spoiled_call=7)  # one check, five calls, and the last check
    with pytest.raises(ArithmeticError, match="element 99 of 100"):
        timings(spoiled, "all_reduce", nbytes=400, calls=5, repetitions=1)
    assert len(made) == 7


def test_cases_are_grouped_by_ranks_and_valid() -> None:
    found = cases(["all_reduce", "send_recv", "barrier"], [2, 4], [4, 8])
    assert [case.ranks for case in found] == [2] * 5 + [4] * 3
    assert Case("barrier", 4) in found
    assert len(set(full())) == len(full())
    assert (QUICK.calls(1.0), QUICK.calls(0.001), QUICK.calls(1e-9)) == (1, 5, 5000)


def test_what_cannot_be_measured_is_left_out_with_a_line() -> None:
    absent = replace(SHM, title="Absent", requires="no_such_package")
    unstartable = replace(SHM, title="Unstartable", launcher=("no-such-program",))
    assert available([SHM, absent, unstartable]) == (
        [SHM],
        [
            "Absent is left out: the Python package no_such_package is not installed.",
            "Unstartable is left out: the program no-such-program is not installed.",
        ],
    )


def state(process: subprocess.Popen[bytes]) -> str:
    """Return the letter by which the kernel reports what a process does."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_busy_processes_compute_on_order_and_end() -> None:
    with BusyProcesses() as busy:
        for count in (2, 0, 3, 1):
            busy.run(count)
            wait_until(lambda wanted=count: [state(one) for one in busy.processes].count("R") == wanted, "them")
        busy.processes[2].kill()
        busy.processes[2].wait()
        with pytest.raises(MeasurementError, match="keep the machine busy"):
            busy.run(1)
    assert all(one.returncode is not None for one in busy.processes)


@pytest.fixture
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANKMESH_GATEWAY", "RANKMESH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.processes
@pytest.mark.usefixtures("_own_environment")
@pytest.mark.parametrize(
    ("ranks", "operations", "names"),
    [
        (2, [name for name in OPERATIONS if OPERATIONS[name].ranks], ["tcp"]),
        (3, OPERATIONS, ["shm", "registered", "attached"]),
    ],
    ids=["messages", "all"],
)
def test_every_operation_of_rankmesh_is_right(ranks: int, operations: list[str], names: list[str]) -> None:
    ours = [IMPLEMENTATIONS[f"rankmesh-{name}"] for name in names]
    wanted = cases(operations, [ranks], [20_000])
    results = Results()
    measure(ours, wanted, lambda case: TINY, results)
    assert set(results.turns) == {
        Cell(case, one.name) for case in wanted for one in ours if one.library not in OPERATIONS[case.operation].without
    }
    assert {len(turns) for turns in results.turns.values()} == {TINY.rounds}
    assert all(0 < results.median(cell) < 1e7 and results.calls[cell] >= 1 for cell in results.turns)
    assert all(version.startswith("RankMesh ") for version in results.versions.values())


@pytest.mark.processes
@pytest.mark.usefixtures("_own_environment")
class TestWorkerGroup:
    def test_ranks_that_do_not_start_are_reported_with_their_output(self) -> None:
        broken = replace(SHM, launcher=(sys.executable, "-c", "raise SystemExit('no licence')"))
        with pytest.raises(MeasurementError, match=r"(?s)with 2 ranks did not start. Its last output:\nno licence"):
            WorkerGroup(broken, 2).__enter__()

    def test_ranks_that_hang_are_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "START_SECONDS", 0.5)
        monkeypatch.setattr(workers, "END_SECONDS", 0.2)
        group = WorkerGroup(replace(SHM, launcher=(sys.executable, "-c", "import time; time.sleep(60)")), 2)
        with pytest.raises(MeasurementError, match="did not start"):
            group.__enter__()
        assert group._launcher.returncode is not None

    def test_rounds_end_with_the_budget_and_a_failing_order_names_the_implementation(self) -> None:
        results = Results()
        with WorkerGroup(SHM, 2) as group:
            in_rounds([group], {CASE: replace(TINY, rounds=9, least=3, budget=0)}, results)
            assert len(results.turns[Cell(CASE, SHM.name)]) == 3
            busy = group.measure("all_reduce", nbytes=1 << 20, calls=2, repetitions=3, processor=True)
            assert len(busy) == 3
            assert all(0 < seconds < 10 for seconds in busy)
            with pytest.raises(MeasurementError, match=r"(?s)RankMesh shm with 2 ranks lost a rank.*KeyError"):
                group.measure("no such operation", nbytes=4, calls=1, repetitions=1)
