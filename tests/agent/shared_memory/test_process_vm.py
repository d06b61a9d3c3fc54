"""Reading another process's memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from rankmesh_agent.shared_memory import process_vm
from rankmesh_agent.shared_memory.process_vm import CHUNK_BYTES, address_of, can_read, read_into
from rankmesh_agent.wire.errors import DistNetworkError

LONGEST = 3 * process_vm._PARALLEL_BYTES + 12345
SHOWING = f"""if True:
    import sys
    import numpy as np
    array = np.arange({LONGEST} // 4 + 1, dtype=np.uint32)
    print(array.ctypes.data, flush=True)
    sys.stdin.readline()"""


def pattern(nbytes: int) -> np.ndarray:
    """Return the first bytes in the memory of ``process``."""
    return np.arange(nbytes // 4 + 1, dtype=np.uint32).view(np.uint8)[:nbytes]


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[int, int]]:
    """Run a process with LONGEST bytes of ``pattern``; return its pid and their address."""
    child = subprocess.Popen([sys.executable, "-c", SHOWING], stdin=-1, stdout=-1, text=True)
    try:
        assert child.stdout is not None
        address = int(child.stdout.readline())
        if not can_read(child.pid, address, pattern(100).tobytes()):
            pytest.skip("this machine lets no process read another one's memory")
        yield child.pid, address
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "nbytes", [0, 1, 4097, 2 * CHUNK_BYTES + 3, process_vm._PARALLEL_BYTES - 1, process_vm._PARALLEL_BYTES, LONGEST]
)
def test_reads_of_another_process(process: tuple[int, int], nbytes: int, parallel: bool) -> None:
    into = np.zeros(nbytes, np.uint8)
    read_into(*process, into, parallel=parallel)
    np.testing.assert_array_equal(into, pattern(nbytes))
    assert not [thread for thread in threading.enumerate() if thread.name == "rankmesh-read"]


def test_a_read_into_a_view(process: tuple[int, int]) -> None:
    view = memoryview(bytearray(100))
    read_into(*process, view)
    assert view == pattern(100).data


@pytest.mark.parametrize("most", [1, 1000])
def test_short_reads_are_continued(monkeypatch, most):
    data = np.arange(5000, dtype=np.uint16)
    got = np.zeros_like(data)
    monkeypatch.setattr(process_vm, "CHUNK_BYTES", most * 2)
    read_into(os.getpid(), address_of(data), got)
    np.testing.assert_array_equal(got, data)


def test_payloads_past_2_gib_are_read_to_the_end():
    nbytes = (1 << 31) + 4096
    with mmap.mmap(-1, nbytes) as source:  # untouched pages take no memory
        source[-1:] = b"!"
        array = np.frombuffer(source, np.uint8)
        address = address_of(array)
        del array
        calls = []

        def counting(pid, here, _, there, __, ___):
            calls.append(ctypes.c_size_t.from_address(there + process_vm._VECTOR // 2).value)
            return calls[-1]

        original, process_vm._readv = process_vm._readv, counting
        try:
            process_vm.read(os.getpid(), address, address, nbytes)
        finally:
            process_vm._readv = original
    assert sum(calls) == nbytes
    assert max(calls) == CHUNK_BYTES


def test_memory_that_is_not_there():
    got = np.zeros(10, np.uint8)
    for where in (0, 8, (1 << 63) - 4096):
        with pytest.raises(DistNetworkError, match="cannot read the memory of process"):
            read_into(os.getpid(), where, got)
    assert not can_read(os.getpid(), 8, b"nonce")


def test_a_process_that_is_gone(process: tuple[int, int]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(DistNetworkError, match="No such process"):
        read_into(gone.pid, process[1], np.zeros(10, np.uint8))
    assert not can_read(gone.pid, process[1], pattern(10).tobytes())


def test_memory_of_a_stranger_is_not_taken_for_the_right_one():
    data = np.frombuffer(b"nonce of somebody else", np.uint8)
    assert can_read(os.getpid(), address_of(data), b"nonce")
    assert not can_read(os.getpid(), address_of(data), b"other")
    for pid in (0, -1, 1 << 31, 1 << 40):
        assert not can_read(pid, address_of(data), b"nonce")
    for address in (0, -8, 1 << 63, 1 << 64):
        assert not can_read(os.getpid(), address, b"nonce")


def test_without_the_system_call_nothing_is_allowed(monkeypatch):
    monkeypatch.setattr(process_vm, "_readv", None)
    data = np.zeros(4, np.uint8)
    assert not can_read(os.getpid(), address_of(data), bytes(4))
    with pytest.raises(DistNetworkError, match="not implemented"):
        read_into(os.getpid(), address_of(data), np.ones(4, np.uint8))


def test_other_threads_run_meanwhile():
    data, got = np.ones(4 * CHUNK_BYTES, np.uint8), np.zeros(4 * CHUNK_BYTES, np.uint8)
    steps = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal steps
        while not ended.is_set():
            steps += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        read_into(os.getpid(), address_of(data), got)
        assert got.all()
    finally:
        ended.set()
        counter.join()
    assert steps


def test_an_error_of_the_second_thread_is_raised(process: tuple[int, int]) -> None:
    far = np.empty(1 << 34, np.uint8)  # never touched: only its addresses count
    with pytest.raises(DistNetworkError, match="cannot read the memory"):
        process_vm.read(*process, address_of(far), far.nbytes, parallel=True)
    assert not [thread for thread in threading.enumerate() if thread.name == "rankmesh-read"]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("writable", [True, False])
def test_addresses_of_all_kinds_of_arrays(dtype, count, writable):
    array = np.zeros(count + 3, dtype)[3:]
    array.flags.writeable = writable
    assert address_of(array) == array.ctypes.data
    if count:
        assert address_of(memoryview(array.view(np.uint8))) == array.ctypes.data
