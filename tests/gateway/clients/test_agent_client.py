"""Questions to several agents at the same time."""

from __future__ import annotations

import asyncio
import socket

import pytest
from support import agent_doubles as doubles

from rankmesh_gateway.clients import agent_client as members_module
from rankmesh_gateway.clients.agent_client import AgentClient

pytestmark = pytest.mark.anyio


@pytest.fixture
def members() -> AgentClient:
    return AgentClient()


def urls(agents, *ranks: int) -> dict[int, str]:
    return {rank: f"{agents.url(rank)}/v1/x" for rank in ranks}


async def test_all_are_asked(agents, members):
    replies = await members.request_all("POST", urls(agents, 0, 1, 2), {"a": 1}, job="train", seconds=10)
    assert {rank: answer.document for rank, answer in replies.items()} == {0: {}, 1: {}, 2: {}}
    assert all(answer.ok for answer in replies.values())
    assert sorted(agents.asked) == [(rank, "POST", "/v1/x", {"a": 1}) for rank in range(3)]


async def test_nobody(members):
    assert await members.request_all("POST", {}, job="train", seconds=1) == {}


async def test_one_that_refuses_says_why(agents, members):
    agents.plays[1] = doubles.problem(409, "group-exists", "there is one")
    replies = await members.request_all("POST", urls(agents, 0, 1), job="train", seconds=10)
    assert replies[0].ok
    assert not replies[1].ok
    assert replies[1]._replace(document=None) == (409, None, "there is one", "group-exists")


@pytest.mark.parametrize(
    ("answer", "detail"),
    [((500, "x"), "it answered 500"), ((404, None), "it answered 404"), ((503, [1]), "it answered 503")],
)
async def test_one_that_refuses_and_is_no_agent(agents, members, answer, detail):
    agents.plays[0] = lambda *_: answer
    (reply,) = (await members.request_all("GET", {0: agents.url(0) + "/"}, job="train", seconds=10)).values()
    assert (reply.ok, reply.detail, reply.code) == (False, detail, "")


async def test_the_dead_and_the_silent_do_not_hold_up_the_others(agents, members):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        agents.plays[1] = doubles.silent
        asked = urls(agents, 0, 1) | {2: f"{dead}/v1/x", 3: "no url", 4: "http://[::1"}
        for seconds in (0.5, 10):  # on a busy machine, rank 0 may need more than the first
            replies = await members.request_all("POST", asked, job="train", seconds=seconds)
            if replies[0].ok:
                break
    assert replies[0].ok
    assert replies[1].detail == f"{asked[1]} did not answer within {seconds} s"
    assert replies[2].detail == f"no process listens at {asked[2]}"
    assert not replies[3].ok
    assert not replies[4].ok


async def test_all_or_none_does_not_wait_for_the_others(agents, members, eventually):
    agents.plays |= {0: doubles.silent, 1: doubles.problem(503, "not-ready", "no"), 2: doubles.silent}
    replies = await asyncio.wait_for(
        members.request_all("POST", urls(agents, 0, 1, 2), job="train", seconds=60, all_or_none=True), timeout=20
    )
    assert [(rank, answer.detail) for rank, answer in replies.items()] == [(1, "no")]
    await asyncio.to_thread(eventually, lambda: sorted(agents.hung_up) == [0, 2])


async def test_an_answer_without_end(agents, members, monkeypatch):
    monkeypatch.setattr(members_module, "MAX_ANSWER_BYTES", 100)
    agents.plays[0] = lambda *_: (200, "x" * 1000)
    (reply,) = (await members.request_all("GET", {0: agents.url(0) + "/"}, job="train", seconds=10)).values()
    assert reply.detail == "its answer has more than 100 bytes"
