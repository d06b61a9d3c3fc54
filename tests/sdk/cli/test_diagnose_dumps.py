"""``rankmesh diagnose DIR``: the dumps of jobs that are over."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command import Done, here
from support.processes import Ranks

WRITTEN = 1_795_000_000.0
SCRIPT = """\
import os, queue, signal, sys
import numpy as np
import rankmesh as dist

def load_batch():
    return queue.Queue().get()

dist.init_process_group()
rank, data = dist.get_rank(), np.ones(1000, np.float32)
dist.group.WORLD._communicator.set_timeout({seconds})  # the join has the usual limit
for step in range(3):
    if step == 2 and rank == 2:
{stuck}
    dist.all_reduce(data)
"""
KILL = """\
import json, os, signal, time, urllib.request
from rankmesh._session.session import require_session

def kill_when_all_wait():
    agent = require_session().agent
    for member in agent.members.values():
        if member.rank != agent.member.rank:
            request = urllib.request.Request(f"{member.http}/v1/groups/world/inflight")
            request.add_header("Authorization", f"Bearer {os.environ['RANKMESH_TOKEN']}")
            while all(call["seq"] != 3 for call in json.load(urllib.request.urlopen(request, timeout=60))):
                time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def diagnose(directory: Path, *arguments: str) -> Done:
    return here("diagnose", str(directory), *arguments)


def leave_dumps(ranks: Ranks, stuck: str, seconds: int = 5) -> Path:
    """Run a job of four ranks that fails; return the directory of its dumps."""
    script, directory = ranks.folder / "train_loop.py", ranks.folder / "dumps"
    script.write_text(SCRIPT.format(stuck=textwrap.indent(stuck, " " * 8), seconds=seconds))
    launcher = ranks.command(
        *("-m", "rankmesh.run", "--nproc-per-node", "4", str(script)),
        name="launcher",
        RANKMESH_DUMP_DIR=str(directory),
    )
    ranks.wait([launcher])
    assert launcher.code in (1, 128 + signal.SIGKILL), launcher
    return directory


@pytest.mark.processes
def test_ranks_that_waited_at_their_deadline(ranks: Ranks):
    directory = leave_dumps(ranks, "load_batch()")
    assert len(list(directory.iterdir())) == 4
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    code, stdout, stderr = diagnose(directory)
    assert (code, stderr) == (1, "")
    assert re.fullmatch(
        r"rank 2 has not come to all_reduce #3 for \d+\.\d s; it is at train_loop\.py:6 in load_batch "
        r"\(inside Queue\.get\); ranks 0-1, 3 wait at train_loop\.py:14\n"
        r"  last common operation: all_reduce\(float32\[1000\], SUM\) #2, \d+\.\d s ago\n"
        r"  what to do: look at that line\n",
        stdout,
    )
    document = diagnose(directory, "--json").document
    assert (document["ok"], document["url"]) == (False, directory.as_uri())
    (finding,) = document["findings"]
    assert (finding["kind"], finding["ranks"], finding["waiting"], finding["young"]) == (
        "elsewhere",
        [2],
        [0, 1, 3],
        False,
    )
    assert [each["state"] for each in document["ranks"]] == ["dumped"] * 4
    assert all(each["stacks"] for each in document["ranks"])
    # Of any rank: one that waits, and has no processor when others ask it at their deadline, is blamed before rank 2.
    assert all("all_reduce #3 in group 'world' waited 5.0 s for rank" in each["reason"] for each in document["ranks"])
    (directory / next(path.name for path in directory.iterdir() if "rank-3" in path.name)).unlink()
    assert "rank 3 left no dump" in diagnose(directory).stdout


@pytest.mark.processes
def test_a_rank_that_was_killed_left_no_dump(ranks: Ranks):
    (ranks.folder / "kill.py").write_text(KILL)
    directory = leave_dumps(ranks, "__import__('kill').kill_when_all_wait()", seconds=60)
    code, stdout, _ = diagnose(directory)
    assert code == 1
    assert stdout.startswith("rank 2 left no dump (rank 0 reports: RankFailedError: rank 2 (")
    assert "it ended with" not in stdout, "it was killed, and had no time to say why"
    assert (
        "; its last operation was all_reduce(float32[1000], SUM) #2; ranks 0-1, 3 wait at train_loop.py:14 in" in stdout
    )


@pytest.mark.processes
def test_a_message_that_was_not_sent(ranks: Ranks):
    directory = leave_dumps(ranks, "dist.recv(data, src=3)")
    code, stdout, _ = diagnose(directory)
    assert code == 1
    assert "ranks 2-3 wait for each other for" in stdout
    assert "rank 2 is in recv from rank 3 (tag 0) at train_loop.py:13" in stdout


# Torch's dumps: as torch 2.13 writes them, shortened


def entry(seq: int, name: str = "all_reduce", state: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": seq,
        "input_dtypes": ["Float"],
        "input_sizes": [[10]],
        "is_p2p": False,
        "op_id": seq,
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"nccl:{name}",
        "record_id": seq - 1,
        "retired": state == "completed",
        "state": state,
        "time_created_ns": int((WRITTEN - 40) * 1e9),
        "time_discovered_completed_ns": int((WRITTEN - 39) * 1e9) if state == "completed" else 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 600_000,
        **more,
    }


def dump(*entries: dict[str, Any], size: int = 3) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(size)))}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def write(directory: Path, dumps: Sequence[Any], name: str = "nccl_trace_rank_{}", pickled: bool = False) -> Path:
    for rank, document in enumerate(dumps):
        if document is not None:
            path = directory / name.format(rank)
            path.write_bytes(pickle.dumps(document, protocol=2) if pickled else json.dumps(document).encode())
            os.utime(path, (WRITTEN, WRITTEN))
    return directory


FRAMES = [
    {"filename": "/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", "line": 83, "name": "wrapper"},
    {"filename": "/home/me/train.py", "line": 20, "name": "step"},
    {"filename": "/home/me/train.py", "line": 90, "name": "<module>"},
]
WAITS = [entry(1), entry(2, state="started", frames=FRAMES)]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("name", ["nccl_trace_rank_{}", "job-7-{}.json", "job-7-rank{}.pickle"])
def test_a_rank_that_has_not_come(tmp_path: Path, pickled: bool, name: str):
    write(tmp_path, [dump(*WAITS), dump(*WAITS), dump(entry(1, frames=FRAMES))], name, pickled)
    assert diagnose(tmp_path) == (
        1,
        (
            "rank 2 has not come to all_reduce #2 for 40.0 s; its last operation was all_reduce(float32[10]) #1 at "
            "train.py:20 in step; ranks 0-1 wait at train.py:20 in step\n"
            "  last common operation: all_reduce(float32[10]) #1, 39.0 s ago\n"
            "  what to do: look at its output: the dump has no line of a rank without a call\n"
        ),
        "",
    )


def test_the_entries_of_gloo_have_no_state(tmp_path: Path):
    """And its groups no ranks."""
    ended = entry(1, state="scheduled", profiling_name="gloo:all_reduce", retired=True)
    waits = entry(2, state="scheduled", profiling_name="gloo:barrier", input_sizes=[], input_dtypes=[])
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    documents = [dump(ended, waits), dump(ended), dump(ended, waits)]
    write(tmp_path, [{**each, "pg_config": config} for each in documents])
    assert diagnose(tmp_path).stdout.startswith("rank 1 has not come to barrier #2 for 40.0 s; its last operation was")


def test_a_wait_is_no_longer_than_its_timeout(tmp_path: Path):
    """A file that was copied has a later time."""
    waits = entry(2, state="started", timeout_ms=25_000)
    write(tmp_path, [dump(waits, size=2), dump(size=2)])
    assert "rank 1 has not come to all_reduce #2 for 25.0 s" in diagnose(tmp_path).stdout


def test_ranks_without_a_dump(tmp_path: Path):
    write(tmp_path, [dump(*WAITS, size=5), None, dump(*WAITS, size=5)])
    code, stdout, _ = diagnose(tmp_path)
    assert code == 1
    assert stdout.startswith(
        "ranks 1, 3-4 left no dump; ranks 0, 2 wait at train.py:20 in step in all_reduce #2 for 40.0"
    )


def test_collectives_in_different_orders(tmp_path: Path):
    first = dump(entry(1), entry(2, state="started"), entry(3, "all_gather", state="scheduled"))
    second = dump(entry(1), entry(2, "all_gather", state="started"), entry(3, state="scheduled"))
    write(tmp_path, [first, second, first])
    code, stdout, _ = diagnose(tmp_path)
    assert (code, stdout) == (
        1,
        (
            "collective #2 differs between the ranks for 40.0 s: ranks 0, 2 are in all_reduce(float32[10]), rank 1 is "
            "in all_gather\n"
            "  last common operation: all_reduce(float32[10]) #1, 39.0 s ago\n"
            "  what to do: make these calls in one order on all ranks\n"
        ),
    )
    (finding,) = diagnose(tmp_path, "--json").document["findings"]
    assert (finding["kind"], finding["ranks"], finding["waiting"]) == ("order", [1], [0, 2])


def test_arrays_of_different_sizes(tmp_path: Path):
    write(tmp_path, [dump(entry(1, state="started", input_sizes=[[each]]), size=2) for each in (10, 20)])
    assert diagnose(tmp_path).stdout.startswith(
        "collective #1 differs between the ranks for 40.0 s: rank 0 is in all_reduce(float32[10]), rank 1 is in "
        "all_reduce(float32[20])\n"
    )


def test_messages_of_a_subgroup(tmp_path: Path):
    """Their names have group ranks."""
    config = {"pg_config": {"7": {"name": "7", "desc": "pair", "ranks": "[1, 2]"}}}
    sends = [
        entry(0, f"send {each}->{1 - each}", state="started", is_p2p=True, process_group=["7", "pair"])
        for each in (0, 1)
    ]
    write(tmp_path, [dump(entry(1)), {**dump(sends[0]), **config}, {**dump(sends[1]), **config}])
    code, stdout, _ = diagnose(tmp_path)
    assert code == 1
    assert stdout.startswith(
        "ranks 1-2 wait for each other for 40.0 s: rank 1 is in send to rank 2 (tag 0) of group pair, rank 2 is in "
        "send to rank 1 (tag 0) of group pair\n"
    )


def test_no_rank_waited(tmp_path: Path):
    write(tmp_path, [dump(entry(1)) for _ in range(3)])
    assert diagnose(tmp_path) == (
        0,
        f"nothing was stuck: there are 3 dumps in {tmp_path}, and no rank waited\n",
        "",
    )
    assert diagnose(tmp_path, "--json").document["ok"] is True


def test_saved_answers_of_the_flight_recorder(tmp_path: Path):
    def record(
        seq: int, state: str, op: str = "all_reduce", call: str = "all_reduce(float32[8], SUM)"
    ) -> dict[str, Any]:
        place = {"group": "aa", "name": "world", "seq": seq, "op": op, "call": call, "dtype": "float32", "count": 8}
        end = None if state == "in-flight" else WRITTEN - 19
        return {**place, "bytes": 32, "begin": WRITTEN - 20, "end": end, "state": state, "error": ""}

    waits = [record(4, "completed"), record(5, "in-flight")]
    receives = [record(4, "completed"), record(0, "in-flight", "recv", "recv from rank 3 (tag 7)")]
    write(tmp_path, [waits, receives, waits, waits], "rank{}.json")
    code, stdout, _ = diagnose(tmp_path)
    assert code == 1
    assert (
        "ranks 1, 3 wait for each other for 20.0 s: rank 1 is in recv from rank 3 (tag 7), rank 3 is in all_red"
        in stdout
    )


# What is refused


def test_a_directory_without_dumps(tmp_path: Path):
    (tmp_path / "below").mkdir()
    (tmp_path / ".hidden").write_text("")
    code, stdout, stderr = diagnose(tmp_path)
    assert (code, stdout) == (5, "")
    assert stderr == (
        f"rankmesh: there is no dump in {tmp_path}: with RANKMESH_DUMP_DIR={tmp_path} each rank writes one there when "
        "a group fails\n"
    )
    assert diagnose(tmp_path / "none").code == 2
    assert here("diagnose", str(tmp_path), "--gateway", "127.0.0.1:1").code == 2


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/rankmesh-evil",)


EVIL = pickle.dumps(dump() | {"entries": [Evil()]})
NO_DUMPS = {
    "text": (b"step 1: loss 0.3\n", "Expecting value"),
    "another document": (b'{"loss": 0.3}', "it has other content"),
    "a list": (b"[1, 2]", "it has other content"),
    "nothing": (b"", "Expecting value"),
    "deep": (b"[" * 100_000, "recursion"),
    "a pickle that calls": (EVIL, "it is a pickle that calls posix.mkdir, which a dump does not"),
    "half a pickle": (pickle.dumps(dump(entry(1)), protocol=2)[:-20], "it is a damaged pickle"),
    "a pickle of a set": (pickle.dumps({1, 2}, protocol=2), "it is a pickle that calls __builtin__.set"),
    "a number": (pickle.dumps(7, protocol=2), "it has other content"),
}


@pytest.mark.parametrize("content", NO_DUMPS)
def test_a_file_that_is_no_dump(tmp_path: Path, content: str):
    write(tmp_path, [dump(), dump()])
    data, words = NO_DUMPS[content]
    path = tmp_path / "stranger_rank_2"
    path.write_bytes(data)
    code, stdout, stderr = diagnose(tmp_path)
    assert (code, stdout) == (5, "")
    assert stderr.startswith(f"rankmesh: {path} is no dump of a flight recorder: ")
    assert words in stderr
    assert "dumps are the files of RANKMESH_DUMP_DIR" in stderr
    assert not Path("/tmp/rankmesh-evil").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"entries": [{}]},
        {"entries": 3},
        {"entries": [entry(1) | {"process_group": "a"}]},
        {"pg_config": {"0": {"ranks": "[0, 999999999]"}}},
        {"pg_config": []},
        {"entries": [entry(1, "send 0->77", state="started")]},
    ],
)
def test_a_damaged_dump(tmp_path: Path, wrong: dict[str, Any]):
    write(tmp_path, [dump(), dump() | wrong])
    code, _, stderr = diagnose(tmp_path)
    assert code == 5
    assert stderr.startswith(f"rankmesh: the dumps in {tmp_path} are damaged (")


def ours(rank: int, job: str = "job", epoch: int = 1, **more: Any) -> dict[str, Any]:
    place = {"format": "rankmesh-dump/1", "job": job, "epoch": epoch, "rank": rank, "attached": False}
    return {**place, "world_size": 2, "host": "h", "pid": 7, **more}


def test_dumps_that_are_not_of_one_job(tmp_path: Path):
    one, two, three, four = (tmp_path / name for name in "1234")
    for directory in (one, two, three, four):
        directory.mkdir()
    write(one, [ours(0), ours(1, "other")])
    assert diagnose(one).stderr == f"rankmesh: {one} has dumps of several jobs, job, other: give --job NAME\n"
    assert "rank 1 left no dump" in diagnose(one, "--job", "job").stdout
    assert "has no dump of job 'third', but of job, other" in diagnose(one, "--job", "third").stderr
    write(two, [ours(0), dump()])
    assert f"{two} has dumps of two kinds, nccl_trace_rank_0 (RankMesh) and nccl_trace_rank_1 (torch)" in (
        diagnose(two).stderr
    )
    write(write(three, [dump()], "a_rank_{}"), [dump()], "b_rank_{}")
    assert "two dumps of rank 0, a_rank_0 and b_rank_0: give a directory" in diagnose(three).stderr
    write(four, [dump()], "trace")
    assert f"{four / 'trace'} has no rank in its name: name the dumps rank_0, rank_1" in diagnose(four).stderr


def test_the_newest_epoch_counts(tmp_path: Path):
    write(tmp_path, [ours(0), ours(1)], "first-{}")
    write(tmp_path, [ours(0, epoch=2), ours(1, epoch=2)], "second-{}")
    found = diagnose(tmp_path, "--json").document["ranks"]
    assert [(each["epoch"], each["rank"]) for each in found] == [(2, 0), (2, 1)]


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"calls": [{}]}, {"stacks": 3}, {"world_size": 1 << 40}])
def test_a_damaged_dump_of_ours(tmp_path: Path, wrong: dict[str, Any]):
    write(tmp_path, [ours(0) | wrong])
    code, _, stderr = diagnose(tmp_path)
    assert code == 5
    assert f"{tmp_path}/nccl_trace_rank_0 is damaged" in stderr
    assert "move it away" in stderr
