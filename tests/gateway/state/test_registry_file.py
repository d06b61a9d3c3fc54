"""The state file: what the next gateway knows, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.gateway_requests import Clock, Requests
from support.state_file import saved

from rankmesh_agent.wire.schemas import FAILED_SECONDS, GroupInfo, LostRank
from rankmesh_gateway.state.event_log import KEPT_EVENTS
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.registry_file import RegistryFile, RegistryFileError

WORLD = GroupInfo("a" * 16, "world", [0, 1], 7, "shm", "", "")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


class Gateway:
    """A registry and its file, as a gateway has them."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.registry = Registry(self.clock)
        self.file = RegistryFile(path)
        try:
            self.file.load(self.registry)
        except RegistryFileError:
            self.file.close()
            raise
        self.file.follow(self.registry)

    def end(self) -> None:
        self.registry.close()
        self.file.close()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.registry.events.since(0)]

    def states(self) -> dict[tuple[str, int], str]:
        return {(info.job, info.member.rank): info.state for info in self.registry.ranks()}


def form(registry: Registry, ask: Requests, job: str) -> None:
    for rank in range(2):
        registry.join(ask.join(rank, job=job))
    for rank in range(2):
        registry.heartbeat(replace(ask.heartbeat(rank, 2, WORLD, job=job), watches_peers=True))


def test_the_next_gateway_knows_jobs_and_events(path, ask):
    first = Gateway(path)
    form(first.registry, ask, "going on")
    form(first.registry, ask, "over")
    for rank in range(2):
        first.registry.leave(ask.leave(rank, job="over", reason="ValueError: x" if rank else ""))
    first.registry.join(ask.join(0, job="waits"))
    first.end()

    second = Gateway(path)
    assert second.kinds() == first.kinds()
    assert second.states() == {
        ("going on", 0): "alive",
        ("going on", 1): "alive",
        ("over", 0): "left",
        ("over", 1): "failed",
    }
    assert [info.reason for info in second.registry.ranks("over")] == ["", "ValueError: x"]
    assert [(job.job, job.epoch, job.state) for job in second.registry.jobs()] == [
        ("going on", 1, "running"),
        ("over", 1, "failed"),
    ]
    for rank in range(2):
        second.registry.heartbeat(ask.heartbeat(rank, 2, WORLD, job="going on"))
    assert [(info.name, info.seqs) for info in second.registry.groups("going on")] == [("world", {"0": 7, "1": 7})]
    assert second.kinds() == first.kinds()  # nothing is news
    second.end()


def test_what_an_earlier_gateway_has_found_is_final(path, ask):
    first = Gateway(path)
    form(first.registry, ask, "job")
    first.registry.heartbeat(replace(ask.heartbeat(0, 2, WORLD), lost=[LostRank(1, "reset")], watches_peers=True))
    first.end()
    second = Gateway(path)
    assert second.registry.heartbeat(ask.heartbeat(1, 2, WORLD)).failed == [1]
    second.end()


def test_the_time_without_a_gateway_is_no_silence(path, ask):
    first = Gateway(path)
    form(first.registry, ask, "job")
    first.clock.advance(2.0)
    first.end()
    second = Gateway(path)
    second.clock.advance(1.0)
    assert set(second.states().values()) == {"alive"}
    second.clock.advance(FAILED_SECONDS)
    assert set(second.states().values()) == {"failed"}
    second.end()


def test_epochs_go_on_being_counted(path, ask):
    first = Gateway(path)
    form(first.registry, ask, "job")
    for rank in range(2):
        first.registry.leave(ask.leave(rank))
    first.end()
    second = Gateway(path)
    second.registry.join(ask.join(0, life=2))
    assert second.registry.join(ask.join(1, life=2)).result(0).epoch == 2
    second.end()


def test_a_listener_goes_on_where_it_was(path, ask):
    first = Gateway(path)
    first.registry.join(ask.join(0))
    seen = first.registry.events.last
    first.registry.join(ask.join(1))
    first.end()
    second = Gateway(path)
    position = second.registry.events.resume_position(seen)
    assert [event.kind for event in second.registry.events.since(position)] == ["rank-joining", "world-complete"]
    assert not second.registry.events.has_dropped(position)
    second.end()


def test_it_keeps_as_many_events_as_the_log(path):
    first = Gateway(path)
    for number in range(KEPT_EVENTS + 50):
        first.registry.events.append("rank-alive", str(number))
    first.end()
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT data FROM event ORDER BY id").fetchall()
    database.close()
    assert [json.loads(data)["detail"] for (data,) in rows] == [str(50 + number) for number in range(KEPT_EVENTS)]


def test_a_forgotten_job_is_not_in_it(path, ask, monkeypatch):
    monkeypatch.setattr("rankmesh_gateway.state.registry.FORGET_SECONDS", 0.0)
    first = Gateway(path)
    form(first.registry, ask, "old")
    for rank in range(2):
        first.registry.leave(ask.leave(rank, job="old"))
    first.clock.advance(1.0)
    form(first.registry, ask, "new")
    first.end()
    second = Gateway(path)
    assert {job for job, _ in second.states()} == {"new"}
    second.end()


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.gateway_requests import Requests
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.registry_file import RegistryFile
registry, file, ask = Registry(), RegistryFile(Path({path!r})), Requests()
file.follow(registry)
for rank in range(2):
    registry.join(ask.join(rank))
print("joined", flush=True)
sys.stdin.read()
"""


def test_a_killed_gateway_leaves_all_but_the_last_moment(path, eventually):
    code = KILLED.format(tests=str(Path(__file__).parents[2]), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"joined\n"
        eventually(lambda: saved(path, "SELECT count(*) FROM epoch") == 1)
        with pytest.raises(RegistryFileError, match="another gateway uses it"):
            RegistryFile(path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = Gateway(path)
    assert found.states() == {("job", 0): "alive", ("job", 1): "alive"}
    found.end()


def test_files_that_are_none_of_a_gateway(path, tmp_path):
    path.write_bytes(b"no database, whatever its name says" * 100)
    with pytest.raises(RegistryFileError, match=r"state\.sqlite: file is not a database"):
        RegistryFile(path)
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE mine (number)")
    database.close()
    with pytest.raises(RegistryFileError, match="it is not one; move it away"):
        RegistryFile(path)
    with pytest.raises(RegistryFileError, match="unable to open"):
        RegistryFile(tmp_path / "nowhere" / "state")


def test_a_damaged_schema(path):
    Gateway(path).end()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE event", b"CREATE T\xc7BLE event"))
    with pytest.raises(RegistryFileError, match=f"cannot use the state file {path}"):
        RegistryFile(path)


def test_a_file_of_another_version(path):
    Gateway(path).end()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 3")
    database.close()
    with pytest.raises(RegistryFileError, match="has format 3, this gateway's is 2"):
        RegistryFile(path)


@pytest.mark.parametrize("damage", ["UPDATE epoch SET data = '{}'", "UPDATE epoch SET data = x'ff'"])
def test_damage(path, ask, damage):
    first = Gateway(path)
    form(first.registry, ask, "job")
    first.end()
    with sqlite3.connect(path) as database:
        database.execute(damage)
    database.close()
    with pytest.raises(RegistryFileError, match=r"damaged: .*move it away"):
        Gateway(path)


def test_a_full_disk_is_a_warning_and_is_made_up_for(path, ask, caplog, eventually):
    first = Gateway(path)
    first.file._database.execute("PRAGMA max_page_count = 1")  # it cannot be less than those there are
    form(first.registry, ask, "job")
    for number in range(100):
        first.registry.events.append("rank-alive", str(number))
    eventually(lambda: "cannot be written" in caplog.text)
    assert first.states() == {("job", 0): "alive", ("job", 1): "alive"}
    first.file._database.execute("PRAGMA max_page_count = 1000000")
    first.end()
    second = Gateway(path)
    assert second.kinds() == first.kinds()
    second.end()


def test_nothing_stays_open(path):
    before = len(os.listdir("/proc/self/fd"))
    Gateway(path).end()
    assert len(os.listdir("/proc/self/fd")) == before
