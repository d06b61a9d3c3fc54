"""A full tmpfs: one warning a process and TCP, or with RANKMESH_TRANSPORT=shm one error at all ranks at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

UNSHARE = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run([*UNSHARE, "mount -t tmpfs tmpfs /tmp"], capture_output=True, check=False).returncode


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not may_mount(), reason="a tmpfs cannot be mounted in a mount namespace here"),
]


def launch(ranks: Ranks, script: str, size: str, **variables: str) -> str:
    """Run a script in three ranks, in whose mount namespace the directory for shared memory is of this size."""
    directory = ranks.folder / "shm"
    directory.mkdir()
    mount = f'mount -t tmpfs -o size={size} tmpfs "{directory}" && exec "$@"'
    command = [*UNSHARE, mount, "sh", sys.executable, "-m", "rankmesh.run", "--nproc-per-node=3", script, "0", "3"]
    launcher = ranks.launch(command, name="launcher", RANKMESH_SHM_DIR=str(directory), **variables)
    ranks.wait([launcher])
    assert launcher.code == 0, repr(launcher)
    return launcher.stdout + launcher.stderr


def make_groups(me: Me) -> None:
    for _ in range(2):
        dist.init_process_group()
        for _ in range(3):
            array = np.ones(10)
            dist.all_reduce(array, group=dist.new_group())
            assert (array == 3).all()
        dist.barrier()
        dist.destroy_process_group()


def test_one_warning_a_process_names_size_and_remedy(ranks: Ranks) -> None:
    written = launch(ranks, str(ranks.script(make_groups)), "2m")
    assert written.count("collectives go over TCP, not shared memory") == 1, written
    for text in (
        "has no room for 6 MiB of shared memory (",
        "MiB are free)",
        f"mount -o remount,size=1g {ranks.folder}/shm",
        "docker run --shm-size",
        "RANKMESH_SHM_DIR",
    ):
        assert text in written


def fail_to_join(me: Me) -> None:
    rank = int(os.environ["RANK"])
    reported = me.attempt(dist.init_process_group, timeout=100)
    assert reported["error"] is not None
    assert reported["seconds"] < 20, reported
    for text in ("has no room for", "MiB are free)", "--shm-size", "RANKMESH_SHM_DIR"):
        assert text in reported["text"], reported
    print(f"rank {rank} has ended")


@pytest.mark.parametrize("size", ["64k", "3m"])
def test_with_shared_memory_alone_all_ranks_fail_at_once(ranks: Ranks, size: str) -> None:
    written = launch(ranks, str(ranks.script(fail_to_join)), size, RANKMESH_TRANSPORT="shm")
    for rank in range(3):
        assert f"rank {rank} has ended" in written, written
