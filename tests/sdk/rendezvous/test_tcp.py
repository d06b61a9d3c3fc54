"""Who hosts the gateway at an address."""

from __future__ import annotations

import contextlib

import pytest
from support.processes import free_port, plain_http_server

from rankmesh._rendezvous.tcp import TcpLocator
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.schemas import UNASSIGNED
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.state.registry import Registry

HERE = "127.0.0.1"


@pytest.mark.parametrize("rank", [0, UNASSIGNED])
def test_a_gateway_whose_host_ended_is_taken_over(opened, settings, answers, rank):
    port = free_port()
    host, heir, other = (opened(TcpLocator, HERE, port, each, settings) for each in (0, rank, 1))
    url = host.find()
    assert heir.find() == url
    assert heir._hosted is None
    host.close()
    assert other.find() == url
    assert not answers(url), "rank 1 does not host"
    assert heir.find() == url
    assert heir._hosted is not None
    assert answers(url)


@pytest.mark.parametrize("rank", [0, UNASSIGNED])
def test_a_gateway_that_is_a_service_is_not_taken_over(opened, settings, answers, rank):
    """Its operator starts the next one, at this address, and with the stores of the last one."""
    listener = bind(HERE, 0, purpose="the test has a gateway")
    server, url, port = HttpServer(listener, "gateway"), url_of(listener), listener.getsockname()[1]
    server.start(lambda: create_app(Registry()))
    with contextlib.closing(server):
        locator = opened(TcpLocator, HERE, port, rank, settings)
        assert locator.find() == url
    for _ in range(2):
        assert locator.find() == url
    assert not answers(url)


def test_port_0_is_any_free_port(opened, settings, answers):
    for rank in (0, UNASSIGNED):
        assert answers(opened(TcpLocator, HERE, 0, rank, settings).find())


@pytest.mark.slow
class TestSomebodyElseThere:
    def test_without_a_rank_the_join_finds_out(self, opened, settings):
        with plain_http_server() as port:
            locator = opened(TcpLocator, HERE, port, UNASSIGNED, settings)
            assert locator.find() == f"http://127.0.0.1:{port}"
            assert locator._hosted is None


@pytest.mark.slow
class TestAnotherHostsAddress:
    ELSEWHERE = "192.0.2.77"

    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(bind=HERE)

    def test_without_a_rank_nothing_is_hosted(self, opened, settings):
        locator = opened(TcpLocator, self.ELSEWHERE, free_port(), UNASSIGNED, settings)
        assert not locator._may_serve

    def test_rank_0_cannot_host_there(self):
        settings = Settings(token="the secret of all", bind=self.ELSEWHERE)
        with pytest.raises(DistNetworkError, match=r"192\.0\.2\.77"):
            TcpLocator(self.ELSEWHERE, free_port(), 0, settings)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_one_that_is_every_hosts_does_not_say_who_is_to_host(self, settings, host):
        with pytest.raises(ValueError, match="does not say on which host"):
            TcpLocator(host, free_port(), UNASSIGNED, settings)

    def test_one_that_cannot_be_resolved(self, settings):
        with pytest.raises(DistNetworkError, match=r"no-such-host\.invalid"):
            TcpLocator("no-such-host.invalid", free_port(), UNASSIGNED, settings)
