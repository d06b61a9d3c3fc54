"""A gateway in this process, and its address as text."""

from __future__ import annotations

import logging

import pytest
from support.processes import wait_until

from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import AddressInUseError
from rankmesh_agent.wire.schemas import JoinRequest, Member


@pytest.fixture
def hosted(settings):
    made = HostedGateway("127.0.0.1", 0, settings)
    yield made
    made.close(settings.job)


def join(hosted: HostedGateway, job: str, world_size: int = 1) -> None:
    member = Member(0, f"instance of {job}", "here", "host", 1, ["127.0.0.1:1"], "http://127.0.0.1:1")
    hosted._registry.join(JoinRequest(job, world_size, member))


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

    def test_it_answers_while_that_very_gateway_is_there(self, hosted, settings):
        wait_until(hosted.address.is_reachable, "the gateway to answer, whose service may still be loading")
        assert not hosted.address._replace(id="another's").is_reachable()
        hosted.close(settings.job)
        assert not hosted.address.is_reachable()


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
        hosted.close("job")


def test_it_is_busy_once_a_world_of_the_job_has_come_together(hosted):
    join(hosted, "other")
    join(hosted, "job", world_size=2)
    assert not hosted.has_world("job")
    assert hosted.has_world("other")


def test_it_says_whose_jobs_it_leaves(hosted, settings, caplog):
    join(hosted, "job")
    join(hosted, "left behind")
    with caplog.at_level(logging.INFO, "rankmesh"):
        hosted.close(settings.job)
    (reported,) = caplog.messages
    assert "ends with job 'job'" in reported
    assert "ranks of 'left behind' are still there" in reported
