"""Ctrl-C put off while processes are being started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from rankmesh_agent.net import interrupts
from rankmesh_agent.net.interrupts import deliver_interrupts, interrupts_deferred


@pytest.fixture(autouse=True)
def _pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert interrupts._active is None
    assert signal.signal(signal.SIGINT, before) in (signal.default_int_handler, signal.SIG_IGN)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_twice_and_fail() -> None:
    press()
    press()
    raise ValueError("no such thing")


def test_it_comes_after_the_block_and_no_error_in_there_is_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_deferred():
        press_twice_and_fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_without_it_nothing_happens() -> None:
    with interrupts_deferred():
        pass


def test_a_handler_of_ones_own_is_called_then() -> None:
    called = []
    signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    with interrupts_deferred():
        press()
        assert called == []
    assert called == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_who_ignores_it_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_deferred():
        press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_it_is_none_of_its_business() -> None:
    seen = []

    def hold() -> None:
        with interrupts_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_forked_process_has_its_own_again() -> None:
    with interrupts_deferred():
        child = os.fork()
        if child == 0:
            try:
                press()
                deliver_interrupts()
            except KeyboardInterrupt:
                os._exit(7 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 8)
            finally:
                os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    deliver_interrupts()
