"""The comparison of several hosts, as far as it goes without root."""

from __future__ import annotations

import os

import pytest

from benchmarks import hosts


def test_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["hosts"])
    with pytest.raises(SystemExit, match="run it as root, with iproute2"):
        hosts.main()


def test_a_command_that_fails_says_which():
    with pytest.raises(SystemExit, match=r"python3 -c .*: no such device"):
        hosts._run("python3", "-c", "raise SystemExit('no such device')")


def test_a_host_without_the_card_says_so(monkeypatch):
    monkeypatch.setattr(hosts, "_CARD", "nothing0")
    with pytest.raises(SystemExit, match="no nothing0"):
        hosts._sent()


def test_the_bytes_sent_are_counted(monkeypatch):
    monkeypatch.setattr(hosts, "_CARD", "lo")
    assert hosts._sent() >= 0
