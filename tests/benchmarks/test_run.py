"""The whole measurement, small, with real ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import team as team_module
from benchmarks.peers import PEERS
from benchmarks.plan import Cell, Effort
from benchmarks.run import run
from benchmarks.team import PeerFailedError, Team

pytestmark = pytest.mark.processes

RANKMESH = [peer for peer in PEERS if peer.library == "rankmesh"]
TINY = Effort(ranks=(2,), sizes=(4, 65536), rounds=2, repetitions=3, seconds=0.002)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANKMESH_GATEWAY", "RANKMESH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_rankmesh_is_measured_over_both_transports() -> None:
    said: list[str] = []
    results = run(RANKMESH, TINY, said.append)
    assert set(results.turns) == {Cell(peer.name, 2, size) for peer in RANKMESH for size in TINY.sizes}
    for cell, turns in results.turns.items():
        assert [len(turn) for turn in turns] == [TINY.repetitions] * TINY.rounds
        assert 0 < results.summary(cell).least < 1e6
        assert results.calls[cell] >= 1
    assert all(version.startswith("RankMesh ") for version in results.versions.values())
    assert said[-1] == "2 ranks: round 2 of 2"


def test_a_peer_that_does_not_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    broken = replace(RANKMESH[0], launcher=(sys.executable, "-c", "raise SystemExit('no licence')"))
    with pytest.raises(PeerFailedError, match=r"(?s)with 2 ranks did not start. Its last words:\nno licence"):
        Team(broken, 2, tmp_path).__enter__()


def test_a_peer_that_hangs_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "START_DEADLINE", 0.5)
    monkeypatch.setattr(team_module, "END_DEADLINE", 0.2)
    hanging = replace(RANKMESH[0], launcher=(sys.executable, "-c", "import time; time.sleep(60)"))
    team = Team(hanging, 2, tmp_path)
    with pytest.raises(PeerFailedError, match="did not start"):
        team.__enter__()
    assert team._launcher.returncode is not None


def test_a_failing_order_names_the_peer(tmp_path: Path) -> None:
    with (
        Team(RANKMESH[0], 2, tmp_path) as team,
        pytest.raises(PeerFailedError, match=r"(?s)RankMesh, shared memory with 2 ranks lost a rank.*ValueError"),
    ):
        team.measure(nbytes=-8, calls=1, repetitions=1)
