"""Staging buffers: how they are made, grow and are dropped, and what remains of a process that ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.attached import SECONDS, attach, in_thread, offer
from support.processes import wait_until
from support.staged import MIB, Recorder, all_reduce, described, served_stream

from rankmesh_agent.group.options import Options
from rankmesh_agent.remote import staging
from rankmesh_agent.remote.staging import MAX_KEPT_BYTES, AgentStream, StagedStream
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import STAGED, Kind
from rankmesh_agent.wire.errors import RankFailedError
from rankmesh_agent.wire.ops import ReduceOp

NOW = Options(SECONDS)


@pytest.fixture
def pair() -> Iterator[tuple[StagedStream, AgentStream, Recorder]]:
    with served_stream() as pair:
        yield pair


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_sealed_file_is_mapped_and_its_descriptor_closed():
    before, made = descriptors(), staging.create(3 * MIB)
    made.bytes[:3] = 1, 2, 3
    mapped = staging.map_received([os.dup(made.descriptor)])
    made.release()
    assert mapped.bytes.size == 4 * MIB
    assert mapped.bytes[:4].tolist() == [1, 2, 3, 0]
    mapped.bytes[3] = 4
    assert made.bytes[3] == 4
    assert descriptors() == before


def test_it_cannot_shrink():
    made = staging.create(1)
    with pytest.raises(PermissionError):
        os.ftruncate(made.descriptor, 0)
    made.release()


def test_a_buffer_grows_is_kept_and_dropped_when_large(pair):
    process, agent, _ = pair
    before = descriptors()
    sizes = []
    for nbytes in (4, 100_000, 2 * MIB, 4, MAX_KEPT_BYTES, MAX_KEPT_BYTES + 4, 8, 40):
        array = all_reduce(process, nbytes // 4)
        assert (array == np.arange(array.size, dtype=np.float32) + 1).all()
        kept = [each._staging for each in (process, agent)]
        assert [None if each is None else each.bytes.size for each in kept] == [
            None if kept[0] is None else kept[0].bytes.size
        ] * 2
        sizes.append(None if kept[0] is None else kept[0].bytes.size // MIB)
    assert sizes == [1, 1, 2, 2, 64, None, 1, 1]
    assert descriptors() == before


def test_the_buffer_of_a_call_that_has_failed_is_not_used_again(pair):
    process, *_ = pair
    all_reduce(process, 3)
    first = process._staging
    frame = attach_frames.encode(Kind.REQUEST, described(0), 0, STAGED)
    process.send(frame)
    assert process.receive(None).header.kind == Kind.ERROR
    process.end_request(failed=True)
    all_reduce(process, 3)
    assert process._staging is not first


IN_A_CALL = """
import dataclasses, json, sys
import numpy as np
from rankmesh_agent.group.options import Options
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_agent.wire.schemas import AgentHeartbeat
from support.attached import SECONDS, attach

attached = attach(None, 0, 2, job=sys.argv[1], offer=AgentHeartbeat(**json.loads(sys.argv[2])))
attached.world.all_reduce(np.ones(1 << 20), ReduceOp.SUM, Options(SECONDS))
"""


def test_a_process_that_is_killed_in_a_call_leaves_nothing_behind(standalones):
    job, before = f"killed-{os.getpid()}", of_buffers()
    peer = in_thread(lambda: attach(standalones[1], 1, 2, job=job))
    offered = json.dumps(dataclasses.asdict(offer(standalones[0])))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", IN_A_CALL, job, offered], env=environment) as process:
        world = peer.result(SECONDS).world
        with contextlib.ExitStack() as end:
            end.callback(process.kill)
            wait_until(lambda: in_flight(standalones[0]), "the call at the agent", SECONDS)
            assert of_buffers() > before
    wait_until(lambda: standalones[0].leases.lease is None, "the lease to end", SECONDS)

    def go_on() -> None:
        for _ in range(2):  # its agent may have taken part in the first one: the arrays were there
            world.all_reduce(np.ones(MIB), ReduceOp.SUM, NOW)

    with pytest.raises(RankFailedError, match="ended without a goodbye"):
        go_on()
    peer.result().close()
    wait_until(lambda: of_buffers() <= before, "the buffers to be unmapped", SECONDS)


def in_flight(standalone: Standalone) -> bool:
    agent = standalone.leases.agent
    return agent is not None and any(record[1].name == "all_reduce" for record in agent.world.active_records())


def of_buffers() -> int:
    """Return how many descriptors and mappings of staging buffers this process has."""
    names = Path("/proc/self/maps").read_text().splitlines()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("memfd:rankmesh-staging" in name for name in names)


def test_a_forked_child_does_not_hold_the_connection(standalones):
    attached = attach(standalones[0], 0, 1, job=f"forked-{os.getpid()}")
    attached.world.all_reduce(np.ones(MIB), ReduceOp.SUM, NOW)
    (stream,) = attached._client._pool._idle
    number = stream.sock.fileno()
    pid = os.fork()
    if not pid:
        try:
            os._exit(int(stat.S_ISSOCK(os.fstat(number).st_mode)))
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    array = np.ones(3)
    attached.world.all_reduce(array, ReduceOp.SUM, NOW)
    assert array.all()
    attached.close()
