"""``rankmesh diagnose DIR``: the dumps of jobs that are over."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command import Done, here
from support.processes import Ranks

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
        if member.rank != agent.rank:
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


# Written by hand


def ours(rank: int, job: str = "job", epoch: int = 1, **more: Any) -> dict[str, Any]:
    place = {"format": "rankmesh-dump/1", "job": job, "epoch": epoch, "rank": rank, "attached": False}
    return {**place, "world_size": 2, "host": "h", "pid": 7, **more}


def write(directory: Path, dumps: Sequence[Any], name: str = "rank-{}.json") -> Path:
    for rank, document in enumerate(dumps):
        (directory / name.format(rank)).write_text(json.dumps(document))
    return directory


def test_no_rank_waited(tmp_path: Path):
    write(tmp_path, [ours(0), ours(1)])
    assert diagnose(tmp_path) == (0, f"nothing was stuck: there are 2 dumps in {tmp_path}, and no rank waited\n", "")
    assert diagnose(tmp_path, "--json").document["ok"] is True


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


NO_DUMPS = {
    "text": (b"step 1: loss 0.3\n", "Expecting value"),
    "another document": (b'{"loss": 0.3}', "it has other content"),
    "a list": (b"[1, 2]", "it has other content"),
    "nothing": (b"", "Expecting value"),
    "deep": (b"[" * 100_000, "recursion"),
    "a pickle": (b"\x80\x02}q\x00.", "codec can't decode"),
    "torch's": (b'{"version": "2.10", "entries": []}', "it has other content"),
    "a number": (b"7", "it has other content"),
}


@pytest.mark.parametrize("content", NO_DUMPS)
def test_a_file_that_is_no_dump(tmp_path: Path, content: str):
    write(tmp_path, [ours(0), ours(1)])
    data, words = NO_DUMPS[content]
    path = tmp_path / "stranger_rank_2"
    path.write_bytes(data)
    code, stdout, stderr = diagnose(tmp_path)
    assert (code, stdout) == (5, "")
    assert stderr.startswith(f"rankmesh: {path} is no dump of a flight recorder: ")
    assert words in stderr
    assert "dumps are the files of RANKMESH_DUMP_DIR" in stderr


def test_dumps_that_are_not_of_one_job(tmp_path: Path):
    one, two = (tmp_path / name for name in "12")
    for directory in (one, two):
        directory.mkdir()
    write(one, [ours(0), ours(1, "other")])
    assert diagnose(one).stderr == f"rankmesh: {one} has dumps of several jobs, job, other: give --job NAME\n"
    assert "rank 1 left no dump" in diagnose(one, "--job", "job").stdout
    assert "has no dump of job 'third', but of job, other" in diagnose(one, "--job", "third").stderr
    write(write(two, [ours(0)], "a"), [ours(0)], "b")
    assert "two dumps of rank 0, a and b: give a directory" in diagnose(two).stderr


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
    assert f"{tmp_path}/rank-0.json is damaged" in stderr
    assert "move it away" in stderr
