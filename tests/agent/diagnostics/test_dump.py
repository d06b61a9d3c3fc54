"""Dumps of the flight recorder: what was in flight when a group failed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from rankmesh_agent.diagnostics.dump import DumpWriter, file_name
from rankmesh_agent.diagnostics.snapshot import add_calls
from rankmesh_agent.group.flight_recorder import FlightRecorder, Record
from rankmesh_agent.wire.errors import CollectiveTimeoutError
from rankmesh_agent.wire.ops import Call, OpType
from rankmesh_agent.wire.snapshot import MAX_DUMPED, RankDump

FAILURE = CollectiveTimeoutError("too late", ranks=[2])


class World:
    """As much of a group as records name."""

    id, name, ranks, seq = "aa", "world", (0, 1), 4

    def matches(self, name: str) -> bool:
        return name == self.name

    def global_rank(self, rank: int) -> int:
        return rank


def recorded(seq: int, started: float, ended: float, error: str = "") -> Record:
    return World(), Call(OpType.BARRIER), seq, started, ended, error, 0


def test_a_call_that_has_failed_since_was_in_flight():
    recorder = FlightRecorder()
    for record in (
        recorded(1, 10.0, 11.0),
        recorded(2, 12.0, 13.0, "Error: before"),
        recorded(3, 14.0, 20.1, "Error: of the failure"),
        recorded(4, 20.2, 20.3, "Error: after"),
    ):
        recorder.record(record)
    found = RankDump("job", 1, 0, attached=False)
    add_calls(found, recorder, (), (), 20.0, MAX_DUMPED)
    assert [(call.seq, call.age) for call in found.calls] == [(3, 6.0)]
    assert [(call.seq, call.age, call.error) for call in found.ended] == [(1, 9.0, ""), (2, 7.0, "Error: before")]


@pytest.fixture
def writer(tmp_path: Path) -> DumpWriter:
    return DumpWriter(str(tmp_path / "dumps"), lambda at, awaited: RankDump("a/job", 1, 2, attached=False), set)


def test_the_file(writer: DumpWriter, tmp_path: Path):
    writer.on_failure(FAILURE, None)
    writer.close()
    assert os.listdir(tmp_path / "dumps") == ["a_job-epoch-1-rank-2.json"]
    found = json.loads((tmp_path / "dumps" / file_name("a/job", 1, 2)).read_text())
    assert (found["format"], found["job"], found["rank"]) == ("rankmesh-dump/1", "a/job", 2)
    assert (found["failure"], found["failed_ranks"]) == ("CollectiveTimeoutError: too late", [2])
    main = found["stacks"][0]
    assert main["frames"][-1]["code"] or any("on_failure" in frame["function"] for frame in main["frames"])
    assert not [thread for thread in threading.enumerate() if thread.name == "rankmesh-dump"]


def test_the_first_failure_counts(writer: DumpWriter, tmp_path: Path):
    writer.on_failure(FAILURE, None)
    writer.close()
    writer.on_failure(CollectiveTimeoutError("because of it"), None)
    writer.close()
    assert "too late" in (tmp_path / "dumps" / file_name("a/job", 1, 2)).read_text()


def test_a_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "dumps").write_text("a file")
    writer = DumpWriter(str(tmp_path / "dumps"), lambda at, awaited: RankDump("job", 1, 2, attached=False), set)
    writer.on_failure(FAILURE, None)
    writer.close()
    assert f"no dump of the flight recorder was written to {tmp_path / 'dumps'}" in caplog.text
