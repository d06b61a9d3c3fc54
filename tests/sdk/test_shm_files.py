"""Files of shared memory: what killed ranks leave is removed, and ranks in several pid namespaces share them.

RANKMESH_TEST_KILLS sets the number of ranks that are killed, 30 by default.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist
from rankmesh_agent.shared_memory import mapping as shared_memory

pytestmark = pytest.mark.processes

_KILLS = int(os.environ.get("RANKMESH_TEST_KILLS", "30"))


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rankmesh-tests-") as directory:
        yield Path(directory)


def work_without_end(me: Me) -> None:
    """Make groups, rings and registered arrays until this process is killed."""
    me.init()
    while True:
        group = dist.new_group()
        for rank in range(me.size):
            peers = [other for other in range(me.size) if other != rank]
            if me.rank == rank:
                for peer in peers:
                    dist.send(np.ones(1000), peer, group=group)
            else:
                dist.recv(np.ones(1000), rank, group=group)
        dist.empty(1000, np.float32, group=group)
        dist.destroy_process_group(group)


def kill_at_random(ranks: Ranks, shm: Path, seed: int) -> int:
    """Start three ranks, kill them at random moments within half a second; return the number of kills."""
    dice = random.Random(seed)
    environment = {"RANKMESH_SHM_DIR": str(shm), "RANKMESH_JOB": f"{ranks.job}-{seed}"}
    started = ranks.start(work_without_end, 3, env=environment)
    moments = sorted((dice.uniform(0, 0.5), rank) for rank in started)
    begun, killed = time.monotonic(), 0
    for moment, rank in moments:
        time.sleep(max(0.0, begun + moment - time.monotonic()))
        killed += rank.code is None
        rank.kill()
    ranks.wait(started)
    assert {rank.code for rank in started} <= {-signal.SIGKILL, 1}, ranks.transcript()
    (ranks.folder / "rendezvous").unlink(missing_ok=True)
    return killed


@pytest.mark.slow
def test_what_killed_ranks_leave_is_removed_by_the_next_start(ranks: Ranks, shm: Path) -> None:
    killed = seed = 0
    while killed < _KILLS:
        killed += kill_at_random(ranks, shm, seed)
        seed += 1
        assert len(list(shm.iterdir())) <= 9, "each start removes what the last one left"
    ranks.run(join_and_leave, 1, env={"RANKMESH_SHM_DIR": str(shm)})
    assert not list(shm.iterdir())


def leave_a_file(me: Me) -> None:
    """Rank 1 dies while it makes shared memory; the others end when they learn of it."""
    me.init()
    dist.barrier()
    if me.rank == 1:
        memory = shared_memory.Mapping.create(shm_dir(), "job", 4096)
        assert memory.name in os.listdir(shm_dir())
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.RankFailedError):
        dist.barrier()
    dist.destroy_process_group()


def test_the_ranks_that_survive_remove_what_a_killed_one_leaves(ranks: Ranks, shm: Path) -> None:
    started = ranks.start(leave_a_file, 3, env={"RANKMESH_SHM_DIR": str(shm)})
    ranks.wait(started)
    assert [rank.code for rank in started] == [0, -signal.SIGKILL, 0], ranks.transcript()
    assert not list(shm.iterdir())


def join_and_leave(me: Me) -> None:
    me.init()
    dist.destroy_process_group()


def share(me: Me) -> None:
    """Make a group, rings and registered arrays, and report whether the arrays are in shared memory."""
    me.init(timeout=60.0)
    array = dist.empty(1000, np.float32)
    array[:] = me.rank
    dist.all_reduce(array)
    assert (array == 1).all()
    if me.rank == 0:
        dist.send(np.ones(100_000), 1)
    else:
        received = np.zeros(100_000)
        dist.recv(received, 0)
        assert (received == 1).all()
    dist.barrier()
    me.report(pid=os.getpid(), mapped=Path("/proc/self/maps").read_text().count(f"{shm_dir()}/"))
    dist.barrier()  # a rank that leaves ends the other one's ring
    dist.destroy_process_group()


def shm_dir() -> str:
    return os.environ["RANKMESH_SHM_DIR"]


def unshare(*command: str) -> list[str]:
    """Return a command that runs in a pid namespace of its own."""
    return ["unshare", "--pid", "--fork", "--mount-proc", *command]


@pytest.mark.parametrize("namespaces", [1, 2])
def test_ranks_in_other_pid_namespaces_share_memory(ranks: Ranks, shm: Path, namespaces: int) -> None:
    if shutil.which("unshare") is None or subprocess.run(unshare("true"), capture_output=True, check=False).returncode:
        pytest.skip("pid namespaces cannot be made here")
    script = str(ranks.script(share))
    variables = {"RANKMESH_SHM_DIR": str(shm), "RANKMESH_TRANSPORT": "shm"}
    started = []
    for rank in range(2):
        command = [sys.executable, script, str(rank), "2"]
        prefix = unshare() if rank < namespaces else []
        started.append(ranks.launch([*prefix, *command], name=f"rank-{rank}", **variables))
    ranks.succeed(started)
    assert [rank.reported["pid"] == 1 for rank in started] == [rank < namespaces for rank in range(2)]
    # The group's segment, the ring, the registered array.
    assert [rank.reported["mapped"] for rank in started] == [3, 3]
    assert not list(shm.iterdir())
