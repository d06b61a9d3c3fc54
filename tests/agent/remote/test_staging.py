"""Staging buffers: which an agent maps, what it refuses, how they grow, and what remains of a process that ends."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from support.attached import SECONDS, attach, in_thread, offer
from support.processes import wait_until

from rankmesh_agent.group.options import Options
from rankmesh_agent.net.stream import FramedStream, StreamClosedError
from rankmesh_agent.remote import staging
from rankmesh_agent.remote.call_stream import CallStream
from rankmesh_agent.remote.staging import MAX_KEPT_BYTES, StagedStream
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import NO_OP, STAGED, Call, Request, Response
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import ProtocolError, RankFailedError
from rankmesh_agent.wire.ops import OpType, ReduceOp

NOW = Options(SECONDS)
FLOATS = code_of(np.dtype(np.float32))
MIB = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd(size: int, seals: int = SEALS, flags: int = os.MFD_ALLOW_SEALING) -> int:
    descriptor = os.memfd_create("of the test", flags)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def read_only() -> int:
    descriptor = memfd(MIB)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return again


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class TestReceived:
    def test_a_sealed_file_is_mapped_and_its_descriptor_closed(self):
        before, made = descriptors(), staging.create(3 * MIB)
        made.bytes[:3] = 1, 2, 3
        mapped = staging.map_received([os.dup(made.descriptor)])
        made.release()
        assert mapped.bytes.size == 4 * MIB
        assert mapped.bytes[:4].tolist() == [1, 2, 3, 0]
        mapped.bytes[3] = 4
        assert made.bytes[3] == 4
        assert descriptors() == before

    def test_it_cannot_shrink(self):
        made = staging.create(1)
        with pytest.raises(PermissionError):
            os.ftruncate(made.descriptor, 0)
        made.release()

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: [memfd(MIB, 0)], id="no seals"),
            pytest.param(lambda: [memfd(MIB, fcntl.F_SEAL_GROW)], id="may shrink"),
            pytest.param(lambda: [memfd(MIB, SEALS | fcntl.F_SEAL_WRITE)], id="no writes"),
            pytest.param(lambda: [memfd(0)], id="empty"),
            pytest.param(lambda: [memfd(1 << 44)], id="huge"),
            pytest.param(lambda: [read_only()], id="read only"),
            pytest.param(lambda: [os.open("/dev/null", os.O_RDWR)], id="a device"),
            pytest.param(lambda: list(os.pipe()), id="two"),
            pytest.param(lambda: [os.pipe()[0]], id="a pipe"),
        ],
    )
    def test_another_is_refused_and_closed(self, make: Callable[[], list[int]]):
        received = make()
        with pytest.raises(ProtocolError, match="an attached process sent"):
            staging.map_received(received)
        for descriptor in received:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)


class Recorder:
    """A session whose group adds 1 to the arrays of an all_reduce; and records how long its buffers were."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.rank = 0

    def group(self, number: int) -> Recorder:
        return self

    def ended(self) -> None:
        return None

    def all_reduce(self, array: Any, op: ReduceOp, options: Options, subject: str) -> None:
        if not array.size:
            raise ValueError("nothing to reduce")
        array += 1
        self.seen.append(array.size)


@pytest.fixture
def pair() -> Iterator[tuple[StagedStream, CallStream]]:
    """A process's end of a stream, and its agent's, which a thread serves."""
    ours, theirs = socket.socketpair()
    process, agent = StagedStream(ours), FramedStream(theirs)
    served = CallStream(Recorder(), agent)  # type: ignore[arg-type]

    def serve() -> None:
        with contextlib.closing(agent):
            served.serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield process, served
    process.close()
    thread.join(SECONDS)
    assert not thread.is_alive()


def described(count: int, filled: tuple[int, ...] = ()) -> bytes:
    call = Call(1, 1.0, -1, 0, 0, OpType.ALL_REDUCE, ReduceOp.SUM, FLOATS, filled, (count,))
    return attach_frames.encode_call(call)


def all_reduce(process: StagedStream, count: int) -> np.ndarray:
    array = np.arange(count, dtype=np.float32)
    view = memoryview(array).cast("B") if count else memoryview(b"")
    process.send_request(Request.CALL, described(count), 0, [view], 0)
    frame = process.receive(None)
    if frame.header.kind == Response.OK:
        process.receive_arrays(frame.header.payload, [view], 0)
    process.end_request(failed=frame.header.kind != Response.OK)
    return array


class TestCalls:
    def test_a_buffer_grows_is_kept_and_dropped_when_large(self, pair):
        process, served = pair
        before = descriptors()
        sizes = []
        for nbytes in (4, 100_000, 2 * MIB, 4, MAX_KEPT_BYTES, MAX_KEPT_BYTES + 4, 8, 40):
            array = all_reduce(process, nbytes // 4)
            assert (array == np.arange(array.size, dtype=np.float32) + 1).all()
            kept = [each._staging for each in (process, served)]
            assert [None if each is None else each.bytes.size for each in kept] == [
                None if kept[0] is None else kept[0].bytes.size
            ] * 2
            sizes.append(None if kept[0] is None else kept[0].bytes.size // MIB)
        assert sizes == [1, 1, 2, 2, 64, None, 1, 1]
        assert descriptors() == before

    @pytest.mark.parametrize(
        ("document", "payload"),
        [
            (described(MIB // 4 + 1), MIB + 4),
            (described(1, (MIB // 4,)), 4),
            (described(1), 8),
            (described(1 << 38), 4 << 38),
            (described((1 << 64) - 1), 4),
        ],
    )
    def test_arrays_that_are_not_in_the_buffer_end_the_stream(self, pair, document, payload, caplog):
        process, served = pair
        all_reduce(process, 1)
        process.send(attach_frames.encode(Request.CALL, document, payload, STAGED))
        with pytest.raises(StreamClosedError):
            process.receive(None)
        assert "violates the protocol" in caplog.text
        assert served._session.seen == [1]

    def test_a_stream_without_a_buffer(self, pair, caplog):
        process, _ = pair
        process.send(attach_frames.encode(Request.CALL, described(1), 4, STAGED))
        with pytest.raises(StreamClosedError):
            process.receive(None)
        assert "has no buffer" in caplog.text

    @pytest.mark.parametrize("kind", [Request.SEND, Request.RECEIVE])
    def test_a_message_that_is_not_in_the_buffer(self, pair, kind, caplog):
        process, _ = pair
        sizes = ((), (MIB,)) if kind == Request.SEND else ((MIB,), ())
        call = attach_frames.encode_call(Call(1, 1.0, 0, 1, 0, 0, NO_OP, FLOATS, *sizes))
        all_reduce(process, 1)
        process.send(attach_frames.encode(kind, call, 4 * sum(sizes[1]), STAGED))
        with pytest.raises(StreamClosedError):
            process.receive(None)
        assert "has no buffer for the 4194304 bytes" in caplog.text

    def test_a_file_that_may_shrink_ends_the_stream(self, pair, caplog):
        process, served = pair
        descriptor = memfd(MIB, 0)
        process.send(attach_frames.encode(Request.CALL, described(1), 4, STAGED), (), [descriptor])
        with pytest.raises(StreamClosedError):
            process.receive(None)
        os.close(descriptor)
        assert "seals" in caplog.text
        assert not served._session.seen

    def test_the_buffer_of_a_call_that_has_failed_is_not_used_again(self, pair):
        process, _ = pair
        all_reduce(process, 3)
        first = process._staging
        frame = attach_frames.encode(Request.CALL, described(0), 0, STAGED)
        process.send(frame)
        assert process.receive(None).header.kind == Response.ERROR
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
    environment = {**os.environ, "PYTHONPATH": str(Path(support.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", IN_A_CALL, job, offered], env=environment) as process:
        world = peer.result(SECONDS).world
        wait_until(lambda: standalones[0].agent.world.active_records(), "the call at the agent", SECONDS)
        assert of_buffers() > before
        process.kill()
    wait_until(lambda: standalones[0].leases.lease is None, "the lease to end", SECONDS)
    with pytest.raises(RankFailedError, match="ended without a goodbye"):
        world.all_reduce(np.ones(MIB), ReduceOp.SUM, NOW)
    peer.result().close()
    wait_until(lambda: of_buffers() <= before, "the buffers to be unmapped", SECONDS)


def of_buffers() -> int:
    """Return how many descriptors and mappings of staging buffers this process has."""
    names = Path("/proc/self/maps").read_text().splitlines()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("memfd:rankmesh-staging" in name for name in names)


def test_a_forked_child_has_neither_descriptor_nor_buffer(standalones):
    attached = attach(standalones[0], 0, 1, job=f"forked-{os.getpid()}")
    attached.world.all_reduce(np.ones(MIB), ReduceOp.SUM, NOW)
    (stream,) = attached._client._pool._idle
    assert stream._staging is not None
    number = stream.sock.fileno()
    pid = os.fork()
    if not pid:
        try:
            attached.close_in_child()
            assert stream._staging is None
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(number)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    array = np.ones(3)
    attached.world.all_reduce(array, ReduceOp.SUM, NOW)
    assert array.all()
    attached.close()
