"""``rankmesh trace``: the calls of all ranks as one trace."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hosting
from support.command import here
from support.me import Me
from support.processes import Ranks, wait_until

import rankmesh as dist

LATE = 1
LATE_SECONDS = 0.05
STEPS = 8
OVERLAPPING = 2


def run_steps(me: Me) -> None:
    """Be a rank of a job of three: in each step, LATE comes late to an all_reduce; rank 0 sends rank 2 a message.

    At the end two receives overlap, and all ranks wait for a key.
    """
    dist.init_process_group()
    rank, data = dist.get_rank(), np.ones(1000, np.float32)
    store = dist.get_default_store()
    pair = dist.new_group([0, 2])
    for step in range(STEPS):
        dist.mark_step()
        if rank == LATE:
            store.wait([f"{step}/0", f"{step}/2"])
            time.sleep(LATE_SECONDS)
        store.set(f"{step}/{rank}", b"")
        dist.all_reduce(data)
        if rank == 0:
            dist.send(data[:5], 2, tag=3)
        if rank == 2:
            dist.recv(data[:5], 0, tag=3)
            dist.barrier(pair)
        if rank == 0:
            dist.barrier(pair)
    if rank == 0:
        store.wait(["posted"])
        for tag in range(OVERLAPPING):
            dist.send(data[:5], 2, tag=tag)
    if rank == 2:
        works = [dist.irecv(data[:5], 0, tag=tag) for tag in range(OVERLAPPING)]
        store.set("posted", b"")
        for work in works:
            work.wait()
    store.set(f"done/{rank}", b"")
    store.wait(["over"])


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs the command on a job that has made its calls; returns its exit, and the document."""
    ranks = Ranks(tmp_path_factory.mktemp("traced"))
    gateway = hosting.cluster({}, 0, "gateway").url
    place = {"RANKMESH_GATEWAY": gateway, "RANKMESH_HOSTING": "embedded", "WORLD_SIZE": "3"}
    started = ranks.start(run_steps, 3, env=lambda rank: {**place, "RANK": str(rank)})

    def command(*arguments: str) -> Any:
        return here(*arguments, "--job", ranks.job, RANKMESH_GATEWAY=gateway)

    for rank in range(3):
        wait_until(lambda rank=rank: command("store", "get", f"done/{rank}", "--timeout", "60").code == 0, "the calls")

    def trace(*options: str) -> tuple[Any, dict[str, Any]]:
        path = Path(tmp_path_factory.mktemp("trace"), "trace.json")
        done = command("trace", "-o", str(path), "--patience", "20", *options)
        return done, json.loads(path.read_text()) if path.exists() else {}

    yield trace
    command("store", "set", "over", "yes")
    ranks.wait(started)
    ranks.end()


def calls(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def arrows(document: dict[str, Any], kind: str) -> list[tuple[int, int, float]]:
    """Return the ranks that arrows lead from and to, and how long they are in time."""
    ends = {phase: {e["id"]: e for e in document["traceEvents"] if e["ph"] == phase} for phase in "sf"}
    return [
        (start["pid"], ends["f"][number]["pid"], ends["f"][number]["ts"] - start["ts"])
        for number, start in ends["s"].items()
        if start["cat"] == kind
    ]


def test_the_trace_has_the_calls_of_all_ranks(traced: Any):
    done, document = traced()
    assert (done.code, done.stderr) == (0, "")
    assert "calls of 3 ranks" in done.stdout
    found = Counter((event["pid"], event["name"]) for event in calls(document))
    for rank in range(3):
        assert found[rank, "all_reduce"] == STEPS
    assert (found[0, "barrier"], found[2, "barrier"]) == (STEPS, STEPS)
    assert (found[0, "send"], found[2, "recv"]) == (STEPS + OVERLAPPING, STEPS + OVERLAPPING)
    reduced = {
        (event["args"]["bytes"], event["args"]["algorithm"])
        for event in calls(document)
        if event["name"] == "all_reduce"
    }
    assert reduced == {(4000, "small_segment")}
    waits = [event["args"] for event in calls(document) if event["name"] == "wait"]
    assert {(each["call"], each["state"]) for each in waits} == {("wait(over)", "under way")}
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"}
    assert {name.partition(" (")[0] for name in names} == {"rank 0", "rank 1", "rank 2"}


def test_arrows_lead_from_the_rank_that_comes_late(traced: Any):
    _, document = traced()
    found = Counter((source, target) for source, target, _ in arrows(document, "waits") if source == LATE)
    assert min(found[LATE, 0], found[LATE, 2]) >= STEPS / 2  # the others may be without a core meanwhile
    waited = [event["args"] for event in calls(document) if event["name"] == "all_reduce" and event["pid"] != LATE]
    late = [each for each in waited if each.get("waited for") == f"rank {LATE}"]
    assert len(late) == found[LATE, 0] + found[LATE, 2]


def test_arrows_lead_from_each_send_to_its_receive(traced: Any):
    _, document = traced()
    found = arrows(document, "message")
    assert [(source, target) for source, target, _ in found] == [(0, 2)] * (STEPS + OVERLAPPING)
    assert all(length >= 0 for _, _, length in found)


def test_viewers_may_open_it(traced: Any):
    """The rules of the format, of which Perfetto drops the events that break them."""
    _, document = traced()
    events = document["traceEvents"]
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "XMisf", event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert event["name"] == "process_name" or event["ph"] == "M" or event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert event["s"] in "gpt", event
    for spans in threads.values():
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(sorted(spans))), "calls overlap"
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(threads) <= set(named)
    assert {name for (rank, _), name in named.items() if rank == 2} >= {"world", "world (2)", "store"}
    starts, ends = ({each["id"]: each for each in events if each["ph"] == phase} for phase in "sf")
    assert (len(starts), set(starts)) == (sum(each["ph"] == "s" for each in events), set(ends))
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"], end["bp"]) == (end["name"], end["cat"], "e")
        assert start["ts"] <= end["ts"]
        for each in (start, end):
            spans = threads[each["pid"], each["tid"]]
            assert any(begin <= each["ts"] <= over for begin, over in spans), "an arrow is tied to no call"


def test_the_last_steps(traced: Any):
    _, document = traced("--steps", "2")
    found = Counter((event["pid"], event["name"]) for event in calls(document))
    assert 2 <= found[0, "all_reduce"] <= 3  # the one of the step before, if another rank was in it still
    marks = {event["name"] for event in document["traceEvents"] if event["ph"] == "i"}
    assert {f"step {STEPS - 2}", f"step {STEPS - 1}"} <= marks
    assert "step 0" not in marks


def test_no_rank_answers(tmp_path: Path):
    done = here("trace", "-o", str(tmp_path / "trace.json"), RANKMESH_GATEWAY=hosting.cluster({}, 0, "empty").url)
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr == "rankmesh: there is no rank to trace; 'rankmesh run' starts some\n"


def test_a_file_that_cannot_be_written(traced: Any, tmp_path: Path):
    path = tmp_path / "no" / "trace.json"
    done, _ = traced("-o", str(path))
    assert (done.code, done.stderr) == (2, f"rankmesh: cannot write {path}: No such file or directory\n")
