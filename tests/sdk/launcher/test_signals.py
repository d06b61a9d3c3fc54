"""Signals collected for the event loop."""

from __future__ import annotations

import os
import signal

from rankmesh._launcher.signals import TERMINATION, SignalPipe


def test_signals_wait_in_the_order_they_came() -> None:
    before = [signal.getsignal(number) for number in TERMINATION]
    with SignalPipe() as inbox:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert inbox.read() == [signal.SIGTERM, signal.SIGINT]
        assert inbox.read() == []
    assert [signal.getsignal(number) for number in TERMINATION] == before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalPipe() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.read() == []
    finally:
        signal.signal(signal.SIGHUP, before)
