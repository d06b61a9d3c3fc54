"""The measurement, small, with real ranks."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from benchmarks import team as team_module
from benchmarks.operations import OPERATIONS
from benchmarks.peers import PEERS, available
from benchmarks.plan import Case, Cell, Effort, cases, takes_part
from benchmarks.results import Results
from benchmarks.run import run
from benchmarks.team import PeerFailedError, Team

pytestmark = pytest.mark.processes

RANKMESH, _ = available(peer for peer in PEERS.values() if peer.module == "rankmesh")
SHM = PEERS["rankmesh-shm"]
TINY = Effort(rounds=2, least=2, repetitions=1, seconds=0.0005)
CASE = Case("all_reduce", 2, 4)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANKMESH_GATEWAY", "RANKMESH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("ranks", "operations"), [(2, ["send_recv", "bandwidth"]), (3, OPERATIONS)])
def test_rankmesh_does_everything_right(ranks: int, operations: list[str]) -> None:
    said: list[str] = []
    wanted = cases(operations, [ranks], [20_000])
    results = Results()
    run(RANKMESH, wanted, lambda case: TINY, results, said.append)
    assert set(results.turns) == {
        Cell(case, peer.name) for case in wanted for peer in RANKMESH if takes_part(peer, case)
    }
    assert {len(turns) for turns in results.turns.values()} == {TINY.rounds}
    assert {len(turn) for turns in results.turns.values() for turn in turns} == {TINY.repetitions}
    assert all(0 < results.summary(cell).least < 1e7 and results.calls[cell] >= 1 for cell in results.turns)
    assert all(version.startswith("RankMesh ") for version in results.versions.values())
    assert said[-1] == f"{ranks} ranks: round {TINY.rounds} of {TINY.rounds} at most"


def test_rounds_end_when_the_time_is_used_up() -> None:
    results = Results()
    run([SHM], [CASE], lambda case: replace(TINY, rounds=9, least=3, budget=0), results)
    assert len(results.turns[Cell(CASE, SHM.name)]) == 3


def test_a_peer_that_does_not_start_is_reported_with_its_last_words() -> None:
    broken = replace(SHM, launcher=(sys.executable, "-c", "raise SystemExit('no licence')"))
    with pytest.raises(PeerFailedError, match=r"(?s)with 2 ranks did not start. Its last words:\nno licence"):
        Team(broken, 2).__enter__()


def test_a_peer_that_hangs_is_given_up_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "START_DEADLINE", 0.5)
    monkeypatch.setattr(team_module, "END_DEADLINE", 0.2)
    hanging = replace(SHM, launcher=(sys.executable, "-c", "import time; time.sleep(60)"))
    team = Team(hanging, 2)
    with pytest.raises(PeerFailedError, match="did not start"):
        team.__enter__()
    assert team._launcher.returncode is not None


def test_a_failing_order_names_the_peer() -> None:
    with (
        Team(SHM, 2) as team,
        pytest.raises(PeerFailedError, match=r"(?s)RankMesh, shared memory with 2 ranks lost a rank.*KeyError"),
    ):
        team.measure("no such operation", nbytes=4, calls=1, repetitions=1)
