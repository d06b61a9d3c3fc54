"""Wrong and failed calls over HTTP beside those of the table (group/test_wrong_calls.py), and what goes on."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import numpy as np
import pytest
from support.http_ranks import GroupsAgent, applications, clients, from_npy, npy
from support.threads import NOW, World, in_threads, world

from rankmesh_agent.http.app import create_app
from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.http.routes import group_calls
from rankmesh_agent.wire.ops import ReduceOp

pytestmark = pytest.mark.anyio

X = npy(np.ones((2, 3), np.float32))
LIMIT = 1000
GROUP = "/v1/groups/world"
JSON = [(b"content-type", b"application/json")]
BOTH = {"ranks": [0, 1], "name": "both"}


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    with world(1, "tcp") as made:
        yield made


@pytest.fixture(scope="module")
def apps_alone(alone: World) -> list[SecurityMiddleware]:
    """The application of its agent, which takes arrays of a thousand bytes."""
    return applications(alone, max_tensor=LIMIT)


@pytest.fixture
async def client(apps_alone: list[SecurityMiddleware]) -> AsyncIterator[httpx.AsyncClient]:
    """Asks it."""
    async with clients(apps_alone) as (made,):
        yield made


@pytest.fixture
def pair() -> Iterator[World]:
    with world(2, "segment") as made:
        yield made


async def problem(asked):
    """Return the status and code of a refusal, and its document."""
    answer = await asked
    assert answer.headers["Content-Type"] == "application/problem+json", answer.content
    document = answer.json()
    assert document["status"] == answer.status_code
    return answer.status_code, document["code"], document


BAD = {
    "no body": (b"", {}, 400, "invalid-tensor", "no body"),
    "no array": (b"hello", {}, 400, "invalid-tensor", "no .npy file"),
    "raw of a half": (b"123", {"dtype": "float32"}, 400, "invalid-tensor", "3 bytes"),
    "raw of another shape": (b"1234", {"dtype": "float32", "shape": "2"}, 400, "invalid-tensor", "8 bytes, but"),
    "no such dtype": (b"1234", {"dtype": "float31"}, 422, "invalid-call", "no dtype 'float31'"),
    "no such shape": (b"1234", {"dtype": "float32", "shape": "1x"}, 422, "invalid-request", "query.shape"),
    "a shape that overflows": (b"", {"dtype": "int8", "shape": "0,999999999999999,9999999999"}, 400, "", "no array"),
    "read as another": (X, {"dtype": "bfloat16"}, 400, "invalid-tensor", "cannot be read as bfloat16"),
    "a factor": (X, {"factor": "2"}, 422, "invalid-call", "factor"),
    "no timeout": (X, {"timeout": "0"}, 422, "invalid-request", "query.timeout"),
    "a mistyped parameter": (X, {"timout": "1"}, 422, "invalid-call", "no parameter 'timout'"),  # codespell:ignore
}


@pytest.mark.parametrize(("body", "query", "status", "code", "text"), BAD.values(), ids=BAD)
async def test_what_is_no_call_is_refused_and_the_group_goes_on(client, body, query, status, code, text):
    found, named, document = await problem(client.post(f"{GROUP}/all_reduce", content=body, params=query))
    assert (found, named) == (status, code or named)
    assert text in document["detail"]
    assert (await client.post(f"{GROUP}/all_reduce", content=X)).status_code == 200


ARGUMENTS = {
    "nothing reported": ("recv", b"", {}, "dtype=float32&shape=2,3"),
    "dtype alone": ("recv", b"", {"dtype": "int8"}, "dtype=float32&shape=2,3"),
    "a scalar": ("all_to_all", npy(np.float32(1)), {}, "a stack of 1"),
    "a body": ("barrier", X, {}, "takes no array"),
}


@pytest.mark.parametrize(("call", "body", "query", "text"), ARGUMENTS.values(), ids=ARGUMENTS)
async def test_arguments_that_make_no_sense(client, call, body, query, text):
    status, code, document = await problem(client.post(f"{GROUP}/{call}", content=body, params=query))
    assert (status, code) == (422, "invalid-call")
    assert text in document["detail"]


async def test_a_media_type_that_holds_no_array(client):
    headers = {"Content-Type": "text/csv; charset=utf-8"}
    status, code, document = await problem(client.post(f"{GROUP}/all_reduce", content=b"1,2", headers=headers))
    assert (status, code) == (415, "unsupported-media-type")
    assert "text/csv" in document["detail"]


@pytest.mark.parametrize(
    ("body", "query", "text"),
    [
        (b"[1, ", {}, "no array"),
        (b"[[1], [2, 3]]", {}, "no array"),
        (b'["1"]', {}, "only numbers"),
        (b'{"x": 1}', {}, "only numbers"),
        (b"[null]", {}, "only numbers"),
        (b"[300]", {"dtype": "uint8"}, "none of uint8"),
        (b"[1.5]", {"dtype": "int64"}, "none of int64"),
        (b"[1, 2]", {"shape": "3"}, "the shape [2], not [3]"),
        (b"[" * 3000, {}, "no array"),
    ],
)
async def test_json_that_is_no_array(client, body, query, text):
    status, code, document = await problem(
        client.post(f"{GROUP}/all_reduce", content=body, params=query, headers={"Content-Type": "application/json"})
    )
    assert (status, code) == (400, "invalid-tensor")
    assert text in document["detail"]


class TestSizes:
    async def test_of_a_body_whose_length_is_said(self, client):
        status, code, _ = await problem(client.post(f"{GROUP}/all_reduce", content=b"x" * 6000))
        assert (status, code) == (413, "body-too-large")

    async def test_of_what_is_to_be_received(self, client):
        query = {"src": 0, "dtype": "float32", "shape": "1000000,1000000"}
        status, code, document = await problem(client.post(f"{GROUP}/scatter", params={"src": 0}, content=b""))
        assert status == 400
        status, code, document = await problem(client.post(f"{GROUP}/recv", params={**query, "src": ""}))
        assert (status, code) == (422, "invalid-request")
        del query["src"]
        status, code, document = await problem(client.post(f"{GROUP}/recv", params=query))
        assert (status, code) == (413, "body-too-large")
        assert "RANKMESH_MAX_BODY" in document["detail"]

    async def test_of_other_requests(self, client):
        body = {"reason": "x" * 10_000}
        assert (await problem(client.post(f"{GROUP}/abort", json=body)))[:2] == (422, "invalid-request")


async def test_a_call_that_others_do_not_come_to(pair):
    async with clients(applications(pair)) as (first, second):
        status, code, document = await problem(first.post(f"{GROUP}/all_reduce?timeout=0.3", content=X))
        assert (status, code) == (504, "collective-timeout")
        assert {name: document[name] for name in ("group", "op", "seq", "ranks", "missing_ranks")} == {
            "group": "world",
            "op": "all_reduce",
            "seq": 1,
            "ranks": [1],
            "missing_ranks": [1],
        }
        assert "first_failure" not in document
        await second.post(f"{GROUP}/all_reduce", content=X)  # all that it needs may be there
        status, code, document = await problem(second.post(f"{GROUP}/barrier"))
        assert (status, code) == (410, "group-aborted")
        status, code, again = await problem(first.post(f"{GROUP}/barrier"))
        assert (status, code) == (504, "collective-timeout")
        assert re.search(r"waited 0\.3 s for rank 1", again["first_failure"])


async def test_a_message_that_does_not_fit(pair):
    async with clients(applications(pair)) as (first, second):
        sent, received = await asyncio.gather(
            first.post(f"{GROUP}/send?dst=1", content=npy(np.zeros(10_000))),
            problem(second.post(f"{GROUP}/recv?src=0&dtype=float32&shape=3")),
        )
        assert received[:2] == (409, "message-mismatch")
        assert (sent.status_code, sent.json()["code"]) == (409, "message-mismatch")
        assert "ranks" not in received[2], "the sender has not failed"


async def test_a_message_that_does_not_come(pair):
    async with clients(applications(pair)) as (_, second):
        status, code, document = await problem(second.post(f"{GROUP}/recv?src=0&dtype=int8&shape=3&timeout=0.2"))
        assert (status, code, document["missing_ranks"], document["op"]) == (504, "collective-timeout", [0], "recv")
        assert (await second.get("/health")).status_code == 200  # only the message was given up


class Leaver:
    """A client that sends a request, and goes away when it is told to."""

    def __init__(self, app, path, body=b"", query=b"", headers=()):
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = asyncio.Event()
        self.sent = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [(b"host", b"localhost"), (b"content-length", str(len(body)).encode()), *headers],
            "http_version": "1.1",
            "scheme": "http",
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)

    async def leave(self):
        self._gone.set()
        await asyncio.wait_for(self.task, 20)


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited 20 s")


class TestAClientThatGoesAway:
    async def test_before_its_turn_nobody_minds(self, pair):
        apps = applications(pair)
        async with clients(apps) as (first, second):
            waiting = asyncio.ensure_future(first.post(f"{GROUP}/all_reduce", content=X))
            await until(lambda: pair.communicators[0].info().seq == 1)
            leaver = Leaver(apps[0], f"{GROUP}/broadcast", X, b"src=0")
            await asyncio.sleep(0.2)
            await leaver.leave()
            answers = await asyncio.gather(waiting, second.post(f"{GROUP}/all_reduce", content=X))
            assert [answer.status_code for answer in answers] == [200, 200]
            answers = await asyncio.gather(*(client.post(f"{GROUP}/barrier") for client in (first, second)))
            assert [answer.status_code for answer in answers] == [204, 204]

    async def test_before_its_message_came_nobody_minds(self, pair):
        apps = applications(pair)
        async with clients(apps) as (first, second):
            leaver = Leaver(apps[0], f"{GROUP}/recv", npy(np.zeros(3)), b"src=1")
            await asyncio.sleep(0.2)
            await leaver.leave()
            assert (await second.post(f"{GROUP}/send?dst=0", content=npy(np.arange(3.0)))).status_code == 204
            received = await first.post(f"{GROUP}/recv", content=npy(np.zeros(3)))
            assert (from_npy(received.content) == np.arange(3)).all()

    async def test_in_the_middle_of_its_body(self, pair):
        apps = applications(pair)
        leaver = Leaver(apps[0], f"{GROUP}/all_reduce", X)
        leaver._messages[0]["more_body"] = True
        await leaver.leave()
        assert pair.communicators[0].info().seq == 0
        assert pair.communicators[0].failure is None


class TestTurns:
    async def test_a_call_whose_turn_does_not_come_in_time_is_not_begun(self, pair):
        async with clients(applications(pair)) as (first, second):
            waiting = asyncio.ensure_future(first.post(f"{GROUP}/all_reduce", content=X))
            await until(lambda: pair.communicators[0].info().seq == 1)
            status, code, document = await problem(first.post(f"{GROUP}/barrier?timeout=0.2"))
            assert (status, code, document["retryable"]) == (504, "collective-timeout", True)
            assert "waited 0.2 s for its turn" in document["detail"]
            answers = await asyncio.gather(waiting, second.post(f"{GROUP}/all_reduce", content=X))
            assert [answer.status_code for answer in answers] == [200, 200]

    async def test_calls_of_the_rank_itself_and_over_http_are_made_in_turn(self, pair):
        apps = applications(pair)

        def own(rank):
            found = []
            for number in range(20):
                array = np.full(3, float(number))
                pair.communicators[rank].all_reduce(array, ReduceOp.SUM, NOW)
                found.append(array[0])
            return found

        async with clients(apps) as (first, second):
            before = await asyncio.to_thread(in_threads, 2, own)
            both = await asyncio.gather(*(client.post(f"{GROUP}/all_reduce", content=X) for client in (first, second)))
            after = await asyncio.to_thread(in_threads, 2, own)
        assert before == after == [[2.0 * n for n in range(20)]] * 2
        assert all((from_npy(answer.content) == 2).all() for answer in both)


async def test_many_receives_hold_up_neither_health_nor_collectives(pair, monkeypatch):
    def counted(slots, kind):
        taken.append(kind)
        return hold(slots, kind)

    taken, hold = [], group_calls.CallSlots.hold
    monkeypatch.setattr(group_calls.CallSlots, "hold", counted)
    monkeypatch.setattr(group_calls, "MAX_WAITERS", 5)
    async with clients(applications(pair)) as (first, second):
        receives = [
            asyncio.ensure_future(first.post(f"{GROUP}/recv?tag={tag}", content=npy(np.zeros(3)))) for tag in range(5)
        ]
        await until(lambda: len(taken) == 5)
        status, code, document = await problem(first.post(f"{GROUP}/recv?tag=9", content=npy(np.zeros(3))))
        assert (status, code, document["retryable"]) == (503, "too-many-calls", True)
        assert (await first.get("/health")).status_code == 200
        answers = await asyncio.gather(*(client.post(f"{GROUP}/barrier") for client in (first, second)))
        assert [answer.status_code for answer in answers] == [204, 204]
        for tag in range(5):
            sent = await second.post(f"{GROUP}/send?dst=0&tag={tag}", content=npy(np.full(3, float(tag))))
            assert sent.status_code == 204
        for tag, answer in enumerate(await asyncio.gather(*receives)):
            assert (from_npy(answer.content) == tag).all()


class TestAbort:
    async def test_waiting_calls_end_everywhere(self, pair):
        async with clients(applications(pair)) as (first, second):
            waiting = asyncio.ensure_future(problem(first.post(f"{GROUP}/all_reduce", content=X)))
            await until(lambda: pair.communicators[0].info().seq == 1)
            answer = await second.post(f"{GROUP}/abort", json={"reason": "we have seen enough"})
            assert answer.status_code == 200
            assert answer.json()["failure"].endswith("aborted over HTTP at rank 1: we have seen enough")
            status, code, document = await waiting
            assert (status, code) == (410, "group-aborted")
            assert "we have seen enough" in document["detail"]

    async def test_without_a_reason_and_again(self, pair):
        async with clients(applications(pair)) as (first, _):
            for _ in range(2):
                answer = await first.post(f"{GROUP}/abort")
                assert answer.status_code == 200
                assert answer.json()["failure"].endswith("at rank 0: no reason was given")


class TestMakingGroups:
    async def test_a_client_that_goes_away_takes_it_back(self, pair):
        begun, ended = [], []

        class Group:
            def abort(self, error):
                ended.append(error)

        def make(wanted, told):
            begun.append(wanted)
            told(Group())
            for _ in range(2000):
                if ended:
                    raise ended[0]
                time.sleep(0.01)

        agent = GroupsAgent(0, 2)
        agent.making = make
        leaver = Leaver(create_app(agent), "/v1/groups", b'{"ranks": [0, 1], "name": "both"}', b"", JSON)
        await until(lambda: begun)
        await leaver.leave()
        assert "went away" in ended[0].message

    @pytest.mark.parametrize(
        ("change", "code", "text"),
        [
            ({"ranks": [0, 0]}, "invalid-call", "a rank twice"),
            ({"ranks": [0, 2]}, "invalid-call", "the job's ranks are 0 to 1"),
            ({"ranks": [1]}, "invalid-call", "this agent's rank, 0"),
            ({"ranks": []}, "invalid-request", "body.ranks"),
            ({"name": ""}, "invalid-request", "body.name"),
            ({"name": "a/b"}, "invalid-request", "body.name"),
            ({"name": "0123456789abcdef"}, "invalid-call", "mistaken for an id"),
            ({"timeout": 0}, "invalid-request", "body.timeout"),
        ],
        ids=str,
    )
    async def test_what_is_no_group(self, pair, change, code, text):
        async with clients(applications(pair)) as (first, _):
            status, named, document = await problem(first.post("/v1/groups", json=BOTH | change))
        assert (status, named) == (422, code)
        assert text in document["detail"]
