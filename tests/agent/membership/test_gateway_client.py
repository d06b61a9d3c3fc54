"""The gateway as an agent sees it: what it does when that one ends, cannot answer, or is somebody else."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from support.gateway_requests import Clock
from support.joins import join_as
from support.pauses import despite_pauses

from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.job_membership import JobMembership
from rankmesh_agent.membership import heartbeats
from rankmesh_agent.membership.gateway_client import GatewayClient, gateway_health
from rankmesh_agent.membership.heartbeats import RankHeartbeats
from rankmesh_agent.membership.join import all_members
from rankmesh_agent.net.http_client import HttpClient
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.errors import DistNetworkError, GatewayUnreachableError, JoinTimeoutError, RankFailedError
from rankmesh_agent.wire.overlay import partners
from rankmesh_agent.wire.schemas import UNASSIGNED, Heartbeat, JoinReply, JoinRequest, Leave, LostRank, Member
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.state.registry import Registry

NOWHERE = "http://127.0.0.1:9"
READY = "is-it-ready"
"""Asked by the tests themselves."""


def member(rank: int, name: str = "") -> Member:
    return Member(rank, name or f"instance-{rank}", "here", "host", os.getpid(), ["127.0.0.1:1"], "http://127.0.0.1:1")


@contextlib.contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """The URL at which an ASGI application is served."""
    listener = bind("127.0.0.1", port, purpose="the test serves HTTP")
    url = url_of(listener)
    server = HttpServer(listener, "served")
    server.start(lambda: app)
    try:
        # The tests' limits are for the client, not for loading the web server.
        with urllib.request.urlopen(f"{url}/health?{READY}", timeout=30) as answer:
            answer.read()
        yield url
    finally:
        server.close()


@contextlib.contextmanager
def client_of(find: Callable[[], str | None]) -> Iterator[GatewayClient]:
    client = GatewayClient(find, "")
    try:
        yield client
    finally:
        client.close()


class Scripted:
    """An ASGI application that answers with one response after the other, and the last one for ever."""

    def __init__(self, *responses: tuple[int, dict[str, Any] | str]) -> None:
        self.responses = list(responses)
        self.asked = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        if scope["query_string"] == READY.encode():
            status, body = 200, ""
        else:
            self.asked += 1
            status, body = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        text = body if isinstance(body, str) else json.dumps(body)
        headers = [(b"content-type", b"text/plain" if isinstance(body, str) else b"application/problem+json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})


PROBLEM = {"type": "about:blank", "title": "", "detail": "it says so"}
CLOSING = 503, {**PROBLEM, "status": 503, "code": "gateway-closing"}
A_BUG = 500, {**PROBLEM, "status": 500, "code": "internal-error"}
UNAVAILABLE = [CLOSING, A_BUG, (500, "Internal Server Error"), (502, "<html>")]
COMPLETE = 200, asdict(JoinReply(True, "job", 1, 1, [member(0)], []))


@pytest.mark.slow
class TestJoin:
    @pytest.mark.parametrize(
        ("responses", "seconds", "error", "asked"),
        [
            *(([response, response, COMPLETE], 20, None, range(3, 4)) for response in UNAVAILABLE),
            ([CLOSING], 1, (GatewayUnreachableError, "it says so"), range(1, 40)),
            *(
                ([response], 20, (DistNetworkError, "is not a RankMesh gateway"), range(1, 2))
                for response in ((501, "unsupported"), (404, "not found"), (200, "[]"))
            ),
        ],
        ids=["closing", "a bug", "cut short", "a proxy", "closing for good", "501", "404", "a list"],
    )
    def test_responses(self, responses, seconds, error, asked):
        """A gateway that is unavailable is asked again until the deadline, with pauses; another server is not."""
        app = Scripted(*responses)
        raised = pytest.raises(error[0], match=error[1]) if error else contextlib.nullcontext()
        with serving(app) as url, client_of(lambda: url) as client, raised as caught:
            assert join_as(client, "job", 1, member(0), seconds).complete
        assert app.asked in asked
        assert caught is None or caught.value.ranks == ((0,) if seconds == 1 else ())

    def test_at_a_gateway_that_ends_it_waits_for_the_next_one_at_the_same_address(self):
        """A rank that joins again right after leaving may reach the old gateway while it shuts down."""
        old, new = Registry(), Registry()
        asked = threading.Event()
        join = old.join

        def joining(request: JoinRequest) -> Any:
            asked.set()
            return join(request)

        old.join = joining  # type: ignore[method-assign]
        replies = []

        def rank_1() -> None:
            with client_of(lambda: url) as client:
                replies.append(join_as(client, "job", 2, member(1), 20))

        thread = threading.Thread(target=rank_1)
        with serving(create_app(old)) as url:
            thread.start()
            assert asked.wait(20)
            old.close()
        with serving(create_app(new), int(url.rpartition(":")[2])), client_of(lambda: url) as client:
            replies.append(join_as(client, "job", 2, member(0), 20))
            thread.join(20)
        assert replies[0] == replies[1]
        assert [(info.member.rank, info.state) for info in new.ranks()] == [(0, "alive"), (1, "alive")]

    def test_the_address_is_asked_for_again_after_each_failure_and_only_then(self):
        places: list[str | None] = [None, NOWHERE]
        found = []

        def find() -> str | None:
            found.append(places.pop(0) if places else url)
            return found[-1]

        with serving(create_app(Registry())) as url, client_of(find) as client:
            reply = []
            thread = threading.Thread(
                target=lambda: reply.append(join_as(client, "job", 2, member(UNASSIGNED, "first"), 20))
            )
            thread.start()
            with client_of(lambda: url) as other:
                join_as(other, "job", 2, member(UNASSIGNED, "second"), 20)
            thread.join(20)
            assert client.url == url
        assert found == [None, NOWHERE, url]
        assert {each.instance: each.rank for each in reply[0].members}.keys() == {"first", "second"}
        assert [each.rank for each in reply[0].members] == [0, 1]

    def test_a_timeout_without_ranks_says_how_many_are_missing_and_frees_the_place(self):
        registry = Registry()
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            with pytest.raises(JoinTimeoutError, match=r"a process without a rank yet .* 2 more process") as caught:
                join_as(client, "job", 3, member(UNASSIGNED, "one"), 1.0)
            assert caught.value.ranks == ()
            assert registry.ranks() == []
            with pytest.raises(JoinTimeoutError, match="ranks 0, 2 of job") as caught:
                join_as(client, "job", 3, member(1), 1.0)
            assert caught.value.ranks == (0, 2)

    def test_who_was_there_is_known_even_if_the_gateway_goes_with_them(self):
        """The first look is at once: a gateway that closes during the first long wait says nothing any more."""
        registry = Registry()
        join = registry.join
        closing = threading.Timer(0.1, registry.close)

        def joining(request: JoinRequest) -> Any:
            if request.wait and closing.ident is None:
                closing.start()
            return join(request)

        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            join(JoinRequest("job", 4, member(0)))
            registry.join = joining  # type: ignore[method-assign]
            with pytest.raises(JoinTimeoutError, match="ranks 1, 3 of job") as caught:
                join_as(client, "job", 4, member(2), 1.5)
            closing.join()
        assert caught.value.ranks == (1, 3)


class TestHeartbeat:
    @pytest.fixture
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(heartbeats, "SUSPECT_SECONDS", 0.0)

    def test_a_gateway_that_stays_away_is_looked_for_and_learns_who_is_there(self, impatient):
        registry = Registry()
        beat = Heartbeat("job", 3, 1, member(0))
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            beats = RankHeartbeats(client)
            client.url = NOWHERE
            beats.send(beat)
            assert client.url == url
            beats.send(beat)
        assert [(info.epoch, info.member.rank, info.state) for info in registry.ranks()] == [(3, 0, "alive")]

        registry.close()
        with serving(create_app(registry)) as url, client_of(lambda: NOWHERE) as client:
            beats = RankHeartbeats(client)
            client.url = url
            beats.send(beat)
            assert client.url == NOWHERE  # a closing one is looked for, too

    def test_one_that_answers_is_not_looked_for(self):
        def find() -> str | None:
            raise AssertionError("nobody is to look for it")

        with serving(create_app(Registry())) as url, client_of(find) as client:
            beats = RankHeartbeats(client)
            client.url = url
            beats.send(Heartbeat("job", 1, 1, member(0)))
            client.url = NOWHERE
            beats.send(Heartbeat("job", 1, 1, member(0)))  # not away for long enough
            stats = beats.stats()
            assert (stats.answered, stats.unanswered) == (1, 1)

    def test_one_that_cannot_be_found_does_not_matter(self, impatient):
        def find() -> str | None:
            raise DistNetworkError("cannot host it")

        with client_of(find) as client:
            beats = RankHeartbeats(client)
            client.url = NOWHERE
            beats.send(Heartbeat("job", 1, 1, member(0)))
            assert client.url == NOWHERE

    def test_a_rank_learns_once_that_it_is_failed(self, caplog):
        registry = Registry()
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            beats = RankHeartbeats(client)
            client.url = url
            beats.send(Heartbeat("job", 1, 2, member(0)))
            assert caplog.messages == []
            registry.heartbeat(Heartbeat("job", 1, 2, member(1), lost=[LostRank(0, "connection reset")]))
            for _ in range(2):
                beats.send(Heartbeat("job", 1, 2, member(0)))
        (message,) = caplog.messages
        assert message.startswith(f"{member(0).described()} is failed for the gateway at {url}: ")


class TestRaiseIfLeft:
    def test_the_gateway_does_not_load_the_framework_for_it(self, monkeypatch: pytest.MonkeyPatch):
        loaded = []
        monkeypatch.setattr("rankmesh_gateway.http.app.create_framework_app", lambda *_: loaded.append(1))
        registry = Registry(clock := Clock())
        for ranks in (range(3), range(2)):  # rank 2 falls silent
            for rank in ranks:
                registry.heartbeat(Heartbeat("job", 1, 3, member(rank)))
            clock.advance(9.0)
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            client.url = url
            assert client.raise_if_left("job", 1)
            assert [rank.member.rank for rank in client.ended_ranks("job", 1) or []] == [2]
            registry.leave(Leave("job", 1, 1, member(1).instance, "no room"))
            assert client.raise_if_left("another", 1)
            with pytest.raises(RankFailedError, match="failed during the join: no room") as caught:
                client.raise_if_left("job", 1)
        assert caught.value.ranks == (1,)
        assert not loaded


class TestEnded:
    def test_a_rank_that_a_restarted_gateway_does_not_know_has_left_after_three_answers(self):
        registry = Registry()
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            client.url = url
            job = object.__new__(JobMembership)
            job.gateway, job.name, job.epoch, job.member, job._unknown = client, "job", 1, member(0), {}
            assert job.ended([1, 2]) == {}, "the gateway has had no heartbeat yet"
            for rank in (0, 2):
                registry.heartbeat(Heartbeat("job", 1, 3, member(rank)))
            assert [list(job.ended([1, 2])) for _ in range(3)] == [[], [], [1]]


class TestGatewayId:
    def test_of_a_gateway(self):
        registry = Registry()
        with serving(create_app(registry)) as url:
            health = gateway_health(url)
            assert health is not None
            assert health.id == registry.id

    def test_of_another_server(self):
        bodies = ["[]", "{}", '{"id": 1}', '{"service": "another", "id": "1"}', "hello"]
        with serving(Scripted(*((200, body) for body in bodies))) as url:
            assert [gateway_health(url) for _ in bodies] == [None] * len(bodies)

    def test_of_no_server(self):
        assert [gateway_health(url) for url in (NOWHERE, "http://[", "no url")] == [None] * 3
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert gateway_health(url_of(silent), timeout=0.2) is None


class TestALargeWorld:
    @despite_pauses
    def test_a_timeout_names_some_ranks_and_counts_the_others(self):
        registry = Registry()
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            for rank in range(100):
                registry.join(JoinRequest("job", 300, member(rank, f"r{rank}")))
            with pytest.raises(JoinTimeoutError, match=r"ranks 101-164 and 135 more of job") as caught:
                join_as(client, "job", 300, member(100, "r100"), 1.0)
        assert "101 have joined" in str(caught.value)
        assert caught.value.ranks == tuple(range(101, 165))

    def test_the_table_of_hosts_is_compressed(self, monkeypatch):
        registry, encodings = Registry(), []
        request = HttpClient.request
        monkeypatch.setattr(
            HttpClient,
            "request",
            lambda *args, **named: encodings.append(request(*args, **named)) or encodings[-1],
        )
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            for rank in range(299):
                registry.join(JoinRequest("job", 300, member(rank, f"r{rank}")))
            reply = join_as(client, "job", 300, member(299, "r299"), 20)
        assert [each.rank for each in reply.members] == sorted([299, *partners(299, 300, 0)])
        assert [*all_members(reply)] == list(range(300))
        assert encodings[-1].headers["content-encoding"] == "gzip"

    def test_addresses_of_other_ranks(self):
        registry = Registry()
        with serving(create_app(registry)) as url, client_of(lambda: url) as client:
            for rank in range(299):
                registry.join(JoinRequest("job", 300, member(rank, f"r{rank}")))
            join_as(client, "job", 300, member(299, "r299"), 20)
            assert client.members("job", 1, [7, 8]) == [member(rank, f"r{rank}") for rank in (7, 8)]
        with pytest.raises(GatewayUnreachableError, match=f"the gateway at {url} does not answer: "):
            client.members("job", 1, [7])

    def test_heartbeats_are_sent_at_the_interval_that_the_gateway_names(self):
        with serving(Scripted((200, {"failed": [], "interval": 500.0}))) as url, client_of(lambda: url) as client:
            client.url = url
            beats = RankHeartbeats(client)
            assert beats.is_due([])
            for _ in range(2):
                beats.send(Heartbeat("job", 1, 1, member(0)))
            assert not beats.is_due([])
