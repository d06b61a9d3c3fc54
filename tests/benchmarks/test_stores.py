"""The measurement of stores, with RankMesh's."""

from __future__ import annotations

import pytest

from benchmarks import stores
from benchmarks.plan import Case, Cell
from benchmarks.results import Results
from benchmarks.store import check, crowded, timings


class Forgetful:
    """A store that loses what it is given."""

    def add(self, key: str, amount: int) -> int:
        return 0

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        return b""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [b""] * len(keys)


def test_a_store_that_forgets_is_not_timed() -> None:
    with pytest.raises(ArithmeticError, match="client 3: the store does not have what was put there"):
        check(Forgetful(), 3)


def test_timings() -> None:
    calls: list[None] = []
    assert len(timings(lambda: calls.append(None), 10, 3)) == 3
    assert len(calls) == 31
    assert crowded(lambda: None, 0.001) > 0


@pytest.mark.processes
def test_rankmesh_store_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "CLIENTS", 3)
    monkeypatch.setattr(stores, "CALLS", 10)
    monkeypatch.setattr(stores, "CROWD_SECONDS", 0.05)
    results = Results()
    stores.measure(list(stores.PEERS[:1]), 2, results, lambda line: None)
    wanted = {Case(name, 1, 0) for name in stores.OPERATIONS} | {Case(name, 3, 0) for name in stores.CROWD}
    assert set(results.turns) == {Cell(case, "rankmesh-store") for case in wanted}
    assert all(len(turns) == 2 for turns in results.turns.values())
    fastest, middle, slowest = (results.summary(Cell(Case(name, 3, 0), "rankmesh-store")) for name in stores.CROWD)
    assert fastest.least <= middle.least <= slowest.least
