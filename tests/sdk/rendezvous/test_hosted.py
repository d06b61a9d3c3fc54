"""A gateway that a process starts for its job, and its address as text."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.joins import join_as
from support.processes import wait_until

from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.gateway_client import GatewayClient, gateway_health
from rankmesh_agent.net.host import host_id
from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError, GatewayUnreachableError
from rankmesh_agent.wire.schemas import Leave, Member


@pytest.fixture
def hosted(settings) -> Iterator[HostedGateway]:
    made = HostedGateway("127.0.0.1", 0, settings, fixed=True)
    yield made
    made.close()


def member_of(pid: int) -> Member:
    return Member(0, "instance", "here", host_id(Settings.shm_dir), pid, ["127.0.0.1:1"], "http://127.0.0.1:1")


def join(hosted: HostedGateway, job: str, pid: int) -> GatewayClient:
    """Have a process join a job of one rank; return its client."""
    client = GatewayClient(lambda: hosted.address.url, "")
    join_as(client, job, 1, member_of(pid), 60.0)
    return client


class TestAddress:
    def test_it_comes_back_from_text(self):
        address = GatewayAddress("http://127.0.0.1:4000", "abc")
        assert (
            GatewayAddress.from_json(address.to_json())
            == GatewayAddress.from_json(address.to_json().encode())
            == address
        )

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"url": "x"}', '{"url": 1, "id": "x"}', b"\xff", b""])
    def test_other_text_is_none(self, text):
        assert GatewayAddress.from_json(text) is None

    def test_it_answers_while_that_very_gateway_is_there(self, hosted):
        wait_until(hosted.address.is_there, "the gateway to answer, whose service may still be loading")
        assert not hosted.address._replace(id="another's").is_there()
        hosted.close()
        assert not hosted.address.is_there()
        hosted.close()


def test_a_place_that_is_taken(hosted, settings):
    port = int(hosted.address.url.rpartition(":")[2])
    with pytest.raises(AddressInUseError, match="this process hosts the gateway"):
        HostedGateway("127.0.0.1", port, settings)


def test_beyond_loopback_it_wants_a_token(settings):
    with pytest.raises(ValueError, match="Set RANKMESH_TOKEN"):
        HostedGateway("0.0.0.0", 0, settings)


def test_a_wildcard_is_not_an_address_to_tell_others():
    settings = Settings(token="the secret of all", advertise=("gateway.example",))
    hosted = HostedGateway("0.0.0.0", 0, settings)
    try:
        assert hosted.address.url.startswith("http://gateway.example:")
    finally:
        hosted.close()


def test_it_is_busy_once_a_world_of_the_job_has_come_together(hosted):
    with contextlib.closing(join(hosted, "other", os.getpid())):
        wait_until(lambda: hosted.has_world("other"), "the gateway's report")
        assert not hosted.has_world("job")


def test_it_outlives_its_host_until_the_last_rank_has_left(hosted):
    with contextlib.closing(join(hosted, "job", os.getpid())) as client:
        hosted.close()
        assert hosted.address.is_there()
        client.leave(Leave("job", 1, 0, "instance", ""))
        wait_until(lambda: not hosted.address.is_there(), "the gateway's end")


@pytest.mark.parametrize("dies", [False, True])
def test_new_worlds_of_a_job_that_publishes_addresses_meet_elsewhere_once_the_host_has_gone(settings, dies):
    hosted = HostedGateway("127.0.0.1", 0, settings)
    with contextlib.closing(join(hosted, "job", os.getpid())) as client:
        hosted._process.stdin.close() if dies else hosted.close()
        wait_until(lambda: not hosted.address.is_there(), "the address to be another's")
        assert gateway_health(hosted.address.url)
        with pytest.raises(GatewayUnreachableError, match="about to end"):
            join_as(GatewayClient(lambda: hosted.address.url, ""), "other", 1, member_of(1), 1.0)
        client.leave(Leave("job", 1, 0, "instance", ""))
        wait_until(lambda: gateway_health(hosted.address.url) is None, "the gateway's end")
        hosted.close()


def test_it_ends_with_ranks_that_are_killed(hosted):
    """They tell nobody; nor does their host, as far as the gateway knows."""
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank,
        contextlib.closing(join(hosted, "job", rank.pid)),
    ):
        wait_until(lambda: hosted.has_world("job"), "the gateway to see the rank")
        hosted.close()
        assert hosted.address.is_there()
        rank.kill()
        rank.wait()
        wait_until(lambda: not hosted.address.is_there(), "the gateway's end", 5.0)


def test_it_is_no_child_of_its_host_and_gets_no_signal_of_the_terminal(hosted):
    pid = wait_until(lambda: hosted.pid, "the gateway")
    assert os.getsid(pid) != os.getsid(0)
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) != os.getpid()


def test_its_log_is_its_hosts(settings, caplog):
    with caplog.at_level(logging.INFO, "rankmesh"):
        hosted = HostedGateway("127.0.0.1", 0, settings)
        hosted.close()
    assert any(message.startswith(f"{hosted.address.url}: open to this user") for message in caplog.messages)


def test_one_that_has_ended_is_an_error_with_its_last_words(hosted):
    os.kill(wait_until(lambda: hosted.pid, "the gateway"), signal.SIGKILL)
    wait_until(hosted._ended.is_set, "its end")
    with pytest.raises(DistNetworkError, match=f"the gateway, process {hosted.pid} that this one started, has ended"):
        hosted.raise_failure()


def test_without_an_interpreter_there_is_a_reason(settings, monkeypatch):
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DistNetworkError, match="cannot start the job's gateway, a process of '/nowhere/python'"):
        HostedGateway("127.0.0.1", 0, settings)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
