"""Every way into a job, and what may happen on it: the table (support/meetings.py). Ranks are processes."""

from __future__ import annotations

import socket

import pytest
from support import hosting
from support.meetings import CELLS, SIZE, Place, die, meet
from support.processes import Ranks, free_port

pytestmark = pytest.mark.processes


def has_ipv6_multicast() -> bool:
    """Return whether datagrams to an IPv6 multicast group leave this machine from an address that others can use."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("ff15::4d4d", 9))
        except OSError:
            return False
        return not probe.getsockname()[0].startswith("fe80")


def port_for(method: str) -> int:
    if method == "multicast over IPv6" and not has_ipv6_multicast():
        pytest.skip("this machine has no route for IPv6 multicast, or no global address on it")
    try:
        return free_port("::1" if method == "tcp over IPv6" else "127.0.0.1")
    except OSError:
        pytest.skip("this machine has no ::1")


@pytest.mark.parametrize(("event", "method"), CELLS)
def test_processes_meet_or_say_why_not(ranks: Ranks, event: str, method: str) -> None:
    env = {"RANKMESH_TOKEN": "the secret of all"} if "IPv6" in method else {"RANKMESH_BIND": "127.0.0.1"}
    gateway = hosting.cluster({}, *((SIZE,) if method == "agents" else (0, "gateway"))).url
    place = Place(method, str(ranks.folder), port_for(method), gateway, ranks.job)
    if event == "restart":
        ranks.wait(ranks.start(die, 1, env=env, place=place))
    started = ranks.start(meet, SIZE, env=env, event=event, place=place)
    ranks.wait(started, to_succeed=True)
    assert [rank.code for rank in started] == [0] * SIZE, ranks.transcript()
    complaints = [line for rank in started for line in rank.complaints.splitlines()]
    if event == "another token":
        assert any("has another token than this service" in line for line in complaints), complaints
    else:
        assert not complaints, ranks.transcript()
    assert not (ranks.folder / "a meeting").exists(), "the rank that hosted the gateway removes its file"
