"""Short time slices for the threads that wait on a busy host."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from rankmesh_agent.net import spin
from rankmesh_agent.net.spin import shorten_time_slice


def slice_of_this_thread() -> int:
    attributes = ctypes.create_string_buffer(spin._ATTRIBUTES.size)
    number = (spin._SET_ATTRIBUTES or 0) + 1  # sched_getattr
    assert ctypes.CDLL(None).syscall(number, 0, attributes, len(attributes), 0) == 0
    return int(spin._ATTRIBUTES.unpack(attributes.raw)[5])


@pytest.mark.skipif(spin._SET_ATTRIBUTES is None, reason="needs Linux on x86-64 or aarch64")
def test_the_thread_has_the_shortest_slice_and_no_later_one_inherits_it() -> None:
    found: list[int] = []

    def run() -> None:
        found.append(slice_of_this_thread())
        for _ in range(2):
            shorten_time_slice()
            found.append(slice_of_this_thread())
        later = threading.Thread(target=lambda: found.append(slice_of_this_thread()))
        later.start()
        later.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    usual, short, again, later = found
    if usual == 0:
        pytest.skip("this kernel has no slices")
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        pytest.skip("these tests were started with a priority, which a thread keeps")
    assert short == again == spin._SHORTEST < usual == later


@pytest.mark.parametrize(("policy", "nice"), [(os.SCHED_BATCH, 0), (os.SCHED_OTHER, -1)])
def test_a_thread_with_a_priority_keeps_it(policy: int, nice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: policy)
    monkeypatch.setattr(os, "getpriority", lambda *_: nice)
    monkeypatch.setattr(spin, "_libc", None)
    shorten_time_slice()
