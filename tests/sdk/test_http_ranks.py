"""Ranks of a job that are SDK processes, and ranks that are HTTP clients: the same calls, the same results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from http.client import HTTPConnection

import httpx
import numpy as np
import pytest
from support.http_ranks import from_npy, npy, services
from support.processes import Ranks, wait_until

import rankmesh as dist

pytestmark = pytest.mark.processes
SIZE = 4
OVER_HTTP = (2, 3)
SHAPE = (3, 2)


def given(rank, shape=SHAPE):
    """Return what a rank contributes."""
    return (np.arange(np.prod(shape), dtype=np.float32) + 10 * rank).reshape(shape)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """The URLs of a gateway, and of its two standalone agents by the rank that they are to hold."""
    started = Ranks(tmp_path_factory.mktemp("services"))
    try:
        with services(started, 2) as (gateway, *agents):
            yield gateway, dict(zip(OVER_HTTP, agents, strict=True))
    finally:
        started.end()


@pytest.fixture
def gateway(urls):
    return urls[0]


@pytest.fixture
def agents(ranks, urls):
    """The agents' URLs, leased over HTTP as ranks 2 and 3 of a world of four that is not complete."""
    _, agents = urls
    for rank, url in agents.items():
        body = {"job": ranks.job, "world_size": SIZE, "rank": rank, "wait": 0}
        assert httpx.post(f"{url}/v1/lease", json=body, timeout=30).status_code == 202
    yield agents
    for url in agents.values():
        assert httpx.delete(f"{url}/v1/lease", timeout=30).status_code == 200


def start_pair(ranks, body, gateway, hosting="embedded", ready="joined"):
    """Start a body in two SDK processes; return them, and clients of their agents."""
    started = ranks.start(body, 2, env={"RANKMESH_HOSTING": hosting}, gateway=gateway)
    ranks.wait_for(f"{ready}-0", f"{ready}-1")
    members = httpx.get(f"{gateway}/v1/ranks", params={"job": ranks.job}, timeout=60).json()
    return started, Clients({each["member"]["rank"]: each["member"]["http"] for each in members})


class Clients:
    """HTTP clients that take their ranks' parts at the same time."""

    def __init__(self, urls):
        self.urls = urls
        self._threads = concurrent.futures.ThreadPoolExecutor(4)

    def joined(self):
        for url in self.urls.values():
            wait_until(lambda url=url: httpx.get(f"{url}/v1/lease?wait=5", timeout=30).json()["state"] == "joined", url)

    def ask(self, rank, call, body=b"", group="world", **query):
        query = {"timeout": 60} | query
        return self._threads.submit(
            httpx.post, f"{self.urls[rank]}/v1/groups/{group}/{call}", content=body, params=query, timeout=90
        )

    def under_way(self, rank):
        """Return how many calls are under way at a rank."""
        return len(httpx.get(f"{self.urls[rank]}/v1/groups/world", timeout=60).json()["inflight"])

    def begun(self, rank):
        """Return how many calls a rank has begun."""
        return httpx.get(f"{self.urls[rank]}/v1/groups/world", timeout=60).json()["seq"]

    def all_ask(self, call, body=lambda rank: b"", **query):
        """Make a call at all ranks; return the answers by rank."""
        asked = {rank: self.ask(rank, call, body(rank), **query) for rank in self.urls}
        return {rank: future.result(90) for rank, future in asked.items()}

    def all_get(self, call, body=lambda rank: b"", **query):
        """Make a call at all ranks; return the arrays they get, by rank, as lists."""
        answers = self.all_ask(call, body, **query)
        assert {answer.status_code for answer in answers.values()} <= {200, 204}, [a.text for a in answers.values()]
        return {
            rank: from_npy(answer.content).tolist() if answer.status_code == 200 else None
            for rank, answer in answers.items()
        }


def sdk_part(me, gateway):
    """Ranks 0 and 1 make some calls, and say what came."""

    def mine(shape=(3, 2)):
        return (np.arange(np.prod(shape), dtype=np.float32) + 10 * me.rank).reshape(shape)

    me.init(init_method=gateway, timeout=60)
    reported = {}
    array = mine()
    dist.all_reduce(array)
    reported["all_reduce"] = array.tolist()
    array = mine()
    dist.reduce(array, dst=2, op=dist.ReduceOp.MAX)
    array = np.empty((3, 2), np.float32)
    dist.scatter(array, src=2)
    reported["scatter"] = array.tolist()
    stack = np.empty((4, 3, 2), np.float32)
    dist.all_to_all_single(stack, mine((4, 3, 2)))
    reported["all_to_all"] = stack.tolist()
    if me.rank == 0:
        dist.send(mine(), dst=2, tag=4)
        array = np.empty((3, 2), np.float32)
        reported["source"] = dist.recv(array, tag=5)
        reported["recv"] = array.tolist()
    dist.barrier()
    me.report(**reported, mismatch=me.attempt(dist.all_reduce, mine()))
    me.mark(f"done-{me.rank}")
    me.report(gone=me.attempt(dist.all_reduce, mine()))
    dist.destroy_process_group()


def test_calls_among_two_sdk_ranks_and_two_http_clients_and_what_goes_wrong(ranks, gateway, agents):
    started = ranks.start(sdk_part, SIZE, ranks=(0, 1), env={"RANKMESH_HOSTING": "embedded"}, gateway=gateway)
    http = Clients(agents)
    http.joined()
    everyone = [given(rank) for rank in range(SIZE)]
    stacks = [given(rank, (SIZE, *SHAPE)) for rank in range(SIZE)]
    like = {"dtype": "float32", "shape": "3,2"}

    found = {"all_reduce": http.all_get("all_reduce", lambda rank: npy(everyone[rank]))}
    reduced = http.all_get("reduce", lambda rank: npy(everyone[rank]), dst=2, op="max")
    assert reduced == {2: np.maximum.reduce(everyone).tolist(), 3: None}
    found["scatter"] = http.all_get("scatter", lambda rank: npy(stacks[2]) if rank == 2 else b"", src=2, **like)
    found["all_to_all"] = http.all_get("all_to_all", lambda rank: npy(stacks[rank]))
    received = http.ask(2, "recv", src=0, tag=4, **like).result(90)
    assert from_npy(received.content).tolist() == everyone[0].tolist()
    assert received.headers["RankMesh-Source"] == "0"
    assert http.ask(3, "send", npy(everyone[3]), dst=0, tag=5).result(90).status_code == 204
    http.all_get("barrier")
    mismatch = http.all_ask("all_reduce", lambda rank: npy(everyone[rank]), op="max")
    assert {answer.status_code for answer in mismatch.values()} == {409}

    ranks.wait_for("done-0", "done-1")
    for rank, process in enumerate(started):
        for call, arrays in found.items():
            arrays[rank] = process.reported[call]
    expected = {
        "all_reduce": [sum(everyone)] * SIZE,
        "scatter": list(stacks[2]),
        "all_to_all": [np.stack([stack[rank] for stack in stacks]) for rank in range(SIZE)],
    }
    for call, arrays in found.items():
        for rank, array in arrays.items():
            assert array == expected[call][rank].tolist(), (call, rank)
    assert (started[0].reported["source"], started[0].reported["recv"]) == (3, everyone[3].tolist())
    for process in started:
        assert process.reported["mismatch"]["error"] == "CollectiveMismatchError", process
        mine = "rank 2: all_reduce(float32[6], MAX) (over HTTP, shape [3, 2])"
        assert mine in process.reported["mismatch"]["text"]

    before = http.begun(2)
    with contextlib.closing(HTTPConnection(agents[2].removeprefix("http://"), timeout=60)) as client:
        client.request("POST", "/v1/groups/world/all_reduce", npy(everyone[2]))
        wait_until(lambda: http.begun(2) > before, "the call to begin: one that has not is only withdrawn")
    ranks.succeed(started)
    for process in started:
        gone = process.reported["gone"]
        assert (gone["error"], gone["ranks"]) == ("GroupAbortedError", [2]), process
        assert gone["text"] == "the HTTP client of rank 2 went away during all_reduce #7"
    later = http.ask(3, "barrier").result(90)
    assert later.status_code in (410, 503), later.text


def makes_groups_and_leaves(me, gateway):
    """Groups of the SDK's before and after one is made over HTTP; then an end with clients' calls under way."""
    me.init(init_method=gateway, timeout=60)
    first = dist.new_group([0, 1])
    me.mark(f"first-{me.rank}")
    me.wait_for("made")
    second = dist.new_group([0, 1])
    array = np.ones(3)
    dist.all_reduce(array, group=first)
    dist.all_reduce(array, group=second)
    me.report(sum=array.tolist())
    me.mark(f"done-{me.rank}")
    me.wait_for("asked")
    if me.rank:
        me.wait_for("left-0")
    began = time.monotonic()
    dist.destroy_process_group()
    me.mark(f"left-{me.rank}")
    wait_until(lambda: not any("http" in thread.name for thread in threading.enumerate()), "the threads to end", 20)
    me.report(seconds=time.monotonic() - began)


def test_groups_made_over_http_beside_the_sdk_s_and_the_end_of_calls_under_way(ranks, gateway):
    started, http = start_pair(ranks, makes_groups_and_leaves, gateway, ready="first")
    urls = http.urls
    with concurrent.futures.ThreadPoolExecutor(2) as threads:

        def make(rank, name, **more):
            body = {"ranks": [0, 1], "name": name, "timeout": 60, **more}
            return httpx.post(f"{urls[rank]}/v1/groups", json=body, timeout=90)

        def make_at_both(name, **more):
            answers = list(threads.map(lambda rank: make(rank, name, **more), (0, 1)))
            assert [answer.status_code for answer in answers] == [201, 201], [answer.text for answer in answers]
            assert answers[0].json()["id"] == answers[1].json()["id"]
            assert {answer.headers["Location"] for answer in answers} == {f"/v1/groups/{answers[0].json()['id']}"}
            return answers[0].json()

        made = make_at_both("pair")
        assert made["medium"] == "shm"
        again = make(0, "pair")
        assert (again.status_code, again.json()["code"]) == (409, "group-exists")
        very = make_at_both("very", instance="once")
        same = make(1, "very", instance="once")
        assert (same.status_code, same.json()["id"]) == (200, very["id"])
        assert make(1, "very", instance="twice").status_code == 409
        found = http.all_get("all_reduce", lambda rank: npy(given(rank)), group="pair")
        assert found[0] == found[1] == (given(0) + given(1)).tolist()
        assert [httpx.delete(f"{url}/v1/groups/pair", timeout=60).status_code for url in urls.values()] == [204, 204]
        assert httpx.get(f"{urls[0]}/v1/groups/pair", timeout=60).status_code == 404
        assert make_at_both("pair")["id"] != made["id"]
        for instance in ("", "repeated"):
            codes = [make(rank, "late", timeout=0.1, instance=instance).json()["code"] for rank in (0, 1)]
            assert codes == ["collective-timeout", "group-aborted"], codes
            make_at_both("late", instance=instance)
            for url in urls.values():
                assert httpx.delete(f"{url}/v1/groups/late", timeout=60).status_code == 204
    ranks.mark("made")
    ranks.wait_for("done-0", "done-1")
    assert [process.reported["sum"] for process in started] == [[4.0] * 3] * 2
    refused = httpx.delete(f"{urls[0]}/v1/groups/world", timeout=60)
    assert (refused.status_code, refused.json()["code"]) == (409, "group-in-use")

    waiting = [http.ask(0, "all_reduce", npy(given(0))), http.ask(0, "recv", npy(given(0)), src=1)]
    wait_until(lambda: http.under_way(0) == 2, "the calls to be under way")
    ranks.mark("asked")
    for each in waiting:
        answer = each.result(60)
        assert (answer.status_code, answer.json()["code"]) == (410, "group-aborted"), answer.text
    ranks.succeed(started)
    assert started[0].reported["seconds"] < 20


def embedded_without_goodbye(me, gateway):
    me.init(init_method=gateway, timeout=60)
    me.mark(f"joined-{me.rank}")
    me.wait_for("asked")


def test_a_script_that_ends_is_not_held_up_by_what_its_http_clients_wait_for(ranks, gateway):
    started, http = start_pair(ranks, embedded_without_goodbye, gateway)
    waiting = [http.ask(0, "recv", npy(given(0)), src=1), http.ask(0, "barrier")]
    wait_until(lambda: http.under_way(0) == 2, "the calls to be under way")
    ranks.mark("asked")
    ranks.succeed(started, 45)
    for each in waiting:
        assert each.result(60).status_code in (410, 503)


def attached(me, gateway):
    me.init(init_method=gateway, timeout=60)
    array = np.ones(3)
    dist.all_reduce(array)
    me.mark(f"joined-{me.rank}")
    if me.rank == 1:
        dist.recv(array, tag=3)
        me.report(received=array.tolist())
    me.wait_for("end")
    dist.all_reduce(array)
    dist.destroy_process_group()


def test_an_agent_with_an_attached_process_takes_messages_and_groups_of_its_own_over_http(ranks, urls):
    gateway, agents = urls
    started, http = start_pair(ranks, attached, gateway, "attached")
    urls = http.urls
    assert set(urls.values()) == set(agents.values())
    assert http.ask(0, "send", npy(np.arange(3.0)), dst=1, tag=3).result(90).status_code == 204
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        body = {"ranks": [1, 0], "name": "pair"}
        made = list(threads.map(lambda rank: httpx.post(f"{urls[rank]}/v1/groups", json=body, timeout=90), (0, 1)))
    assert [answer.status_code for answer in made] == [201, 201], [answer.text for answer in made]
    found = http.all_get("all_gather", lambda rank: npy(given(rank)), group="pair")
    assert found[0] == found[1] == [given(1).tolist(), given(0).tolist()]
    ranks.mark("end")
    ranks.succeed(started)
    assert started[1].reported["received"] == [0.0, 1.0, 2.0]
