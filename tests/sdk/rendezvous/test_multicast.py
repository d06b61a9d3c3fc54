"""Who hosts the gateway when the address is a multicast group; everything stays on the loopback interface."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
from support.joins import join_as
from support.processes import wait_until

from rankmesh._rendezvous.multicast import Datagram, MulticastLocator, MulticastSocket, job_digest
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.wire.schemas import Member

pytestmark = pytest.mark.slow

GROUP = "239.255.41.9"


@pytest.fixture
def port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def meet(opened, port) -> Callable[..., MulticastLocator]:
    def make(rank: int, job: str = "job") -> MulticastLocator:
        return opened(MulticastLocator, GROUP, port, rank, Settings(job=job, bind="127.0.0.1"))

    return make


def found(*meetings: MulticastLocator) -> list[str]:
    """What they find, each in a thread of its own, when all have found the same gateway or one each."""
    urls: list[str] = [""] * len(meetings)

    def search(number: int) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not urls[number]:
            urls[number] = meetings[number].find() or ""

    threads = [threading.Thread(target=search, args=(number,)) for number in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(urls), urls
    return urls


def agreed(*meetings: MulticastLocator) -> str:
    """The one gateway that they find in the end: after a pause of this process two of them may host for a moment."""
    return wait_until(lambda: len(urls := set(found(*meetings))) == 1 and urls.pop(), "one gateway")


def test_rank_0_comes_before_those_without_a_rank_and_the_others_never_host(meet):
    meetings = [meet(0), meet(-1), meet(3)]  # rank 0 asks first: after a pause it may find that the other one hosts
    agreed(*meetings)
    assert [locator._hosted is not None for locator in meetings] == [True, False, False]


def test_jobs_do_not_hear_each_other(meet):
    one, two, one_again = meet(0, "one"), meet(0, "two"), meet(1, "one")
    urls = found(one, two, one_again)
    assert urls[0] == urls[2] != urls[1]


def test_a_host_that_ends_is_followed_by_another(meet):
    first, second = meet(-1), meet(-1)
    found(first)
    url = agreed(first, second)
    host, other = (first, second) if first._hosted is not None else (second, first)
    host.close()
    assert found(other) != [url]
    assert other._hosted is not None


def test_of_two_hosts_the_lower_name_stays(meet, answers):
    """Datagrams may be lost, so that a second process hosts: they hear of each other, and one gives way."""
    high, low = meet(-1), meet(0)
    lost = found(high)[0]
    low._serve()
    high._host.join(20)
    assert found(high, low) == [low._hosted.address.url] * 2
    assert not answers(lost)


def test_a_host_whose_world_has_come_together_does_not_give_way(meet, port):
    host = meet(-1)
    url = found(host)[0]
    member = Member(0, "instance", "here", "host", os.getpid(), ["127.0.0.1:1"], "http://127.0.0.1:1")
    client = GatewayClient(lambda: url, "")
    join_as(client, "job", 1, member, 60.0)
    client.close()
    wait_until(lambda: host._hosted.has_world("job"), "the gateway's report")
    other = meet(0)
    other._serve()
    channel = MulticastSocket(GROUP, port, "127.0.0.1", "")
    try:  # both answer, and so hear each other, several times
        for number in range(3):
            asker, senders = f"2stranger-{number}", set()
            channel.send(Datagram("ask", job_digest("job"), asker))
            for message in channel.receive(20):
                senders |= {message.sender} if message.to == asker else set()
                if senders == {host._name, other._name}:
                    break
            assert senders == {host._name, other._name}
    finally:
        channel.close()
    assert host._hosted.address.url == url


def test_an_answer_to_somebody_else_is_not_believed(meet, port):
    """Somebody who plays back an old answer must not be able to send a rank elsewhere with the job's token."""
    host, asker = meet(0), meet(1)
    found(host)
    address = host._hosted.address
    channel = MulticastSocket(GROUP, port, "127.0.0.1", "")
    host._ending.set()
    host._host.join()  # the gateway is there, but nobody answers in the group
    try:
        for to in ("", "1another"):
            channel.send(Datagram("here", job_digest("job"), "0old", to, *address))
            assert asker.find() is None
        channel.send(Datagram("here", job_digest("job"), "0new", asker._name, "http://127.0.0.1:9", address.id))
        assert asker.find() is None, "nobody is there"

        def told() -> str | None:
            channel.send(Datagram("here", job_digest("job"), "0new", asker._name, *address))
            return asker.find()

        assert wait_until(told, "the answer to be believed") == address.url
    finally:
        channel.close()


def test_a_token_keeps_strangers_out(opened, port):
    ours = Settings(job="job", bind="127.0.0.1", token="right")
    host, friend = (opened(MulticastLocator, GROUP, port, rank, ours) for rank in (0, 1))
    stranger = opened(MulticastLocator, GROUP, port, 1, Settings(job="job", bind="127.0.0.1", token="wrong"))
    assert len(set(found(host, friend))) == 1
    assert stranger.find() is None


def test_beyond_loopback_it_wants_a_token(port):
    with pytest.raises(ValueError, match="Set RANKMESH_TOKEN"):
        MulticastLocator(GROUP, port, 0, Settings(bind="0.0.0.0"))


def test_a_link_local_address_is_no_use_to_others(port):
    with pytest.raises(ValueError, match="wider scope"):
        MulticastLocator("ff12::77", port, 0, Settings(bind="fe80::1", token="the secret of all"))
