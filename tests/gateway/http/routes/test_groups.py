"""Groups made, aborted, shrunk and grown over HTTP, with doubles of the agents."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support import agent_doubles as doubles

from rankmesh_agent.wire.schemas import FAILED_SECONDS, GroupInfo, InFlight
from rankmesh_gateway.clients import group_controller

pytestmark = pytest.mark.anyio

PAIR = "00000000000000aa"


@pytest.fixture(autouse=True)
def beat(registry, ask, agents):
    """A function by which a rank of four says that it lives, and that it is in the group ``pair`` of 0 and 1."""

    def beat(*ranks: int) -> None:
        for rank in ranks:
            sign = ask.heartbeat(rank, 4)
            sign.member.http = agents.url(rank)
            if rank < 2:
                sign.groups = [GroupInfo(PAIR, "pair", [0, 1], 5, "shm", "", "")]
            registry.heartbeat(sign)

    beat(0, 1, 2, 3)
    return beat


def check(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    return answer.json()


class TestReading:
    async def test_jobs(self, client):
        (job,) = (await client.get("/v1/jobs")).json()
        assert isinstance(job.pop("since"), float)
        assert job == {
            "job": "job",
            "epoch": 1,
            "state": "running",
            "world_size": 4,
            "ranks": {"alive": 4},
            "ended": None,
        }

    async def test_one_group(self, client):
        by_name = (await client.get("/v1/groups/pair")).json()
        assert by_name == (await client.get(f"/v1/groups/{PAIR}", params={"job": "job"})).json()
        assert (by_name["id"], by_name["ranks"]) == (PAIR, [0, 1])
        check(await client.get("/v1/groups/nobody"), 404, "group-not-found")
        check(await client.get("/v1/groups/pair", params={"job": "other"}), 404, "group-not-found")

    async def test_in_flight(self, client, registry, ask, agents):
        sign = ask.heartbeat(0, 4)
        sign.groups = [
            GroupInfo(PAIR, "pair", [0, 1], 6, "shm", "", "", 0, [InFlight("barrier()", 6, 0.1, 0)]),
            GroupInfo("00000000000000bb", "other", [0, 1], 1, "shm", "", "", 0, [InFlight("barrier()", 1, 0.1, 0)]),
        ]
        registry.heartbeat(sign)
        (call,) = (await client.get("/v1/groups/pair/inflight")).json()
        assert (call["op"], call["arrived"], call["missing"]) == ("barrier()", [0], [1])
        check(await client.get("/v1/groups/nobody/inflight"), 404, "group-not-found")


class TestMake:
    async def test_all_members_are_asked_the_same(self, client, agents):
        answer = await client.post("/v1/groups", json={"job": "job", "ranks": [3, 1], "name": "two", "timeout": 5})
        assert answer.status_code == 201
        made = {"job": "job", "epoch": 1, "id": "00000000000000cc", "name": "two", "ranks": [3, 1]}
        assert answer.json() == made
        assert agents.what("POST", "/v1/groups") == [1, 3]
        first, second = (document for _, _, _, document in agents.asked)
        assert first == second
        assert (first["ranks"], first["name"], first["timeout"]) == ([3, 1], "two", 5)
        assert len(first["instance"]) >= 16

    async def test_without_a_name_it_gets_one(self, client):
        assert (await client.post("/v1/groups", json={"job": "job", "ranks": [0]})).json()["name"] == "group-1"

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ({"ranks": []}, "expected a list of length >= 1"),
            ({"ranks": [0, 0]}, "a rank is listed twice"),
            ({"ranks": [0, 7]}, "rank 7 is not in the job, whose ranks are 0 to 3"),
            ({"ranks": [-1]}, "ranks[0]"),
            ({"ranks": [0], "name": "no spaces"}, "name"),
            ({"ranks": [0], "timeout": 0}, "timeout"),
        ],
    )
    async def test_nonsense(self, client, body, says):
        answer = await client.post("/v1/groups", json={"job": "job"} | body)
        assert says in check(answer, 422, "invalid-request")["detail"]

    async def test_of_nobody(self, client):
        problem = check(await client.post("/v1/groups", json={"job": "other", "ranks": [0]}), 404, "job-not-found")
        assert "'other'" in problem["detail"]

    async def test_a_name_that_is_taken(self, client, agents):
        check(await client.post("/v1/groups", json={"job": "job", "ranks": [2], "name": "pair"}), 409, "group-exists")
        assert agents.asked == []

    async def test_members_that_are_gone(self, client, registry, ask, agents):
        registry.leave(ask.leave(1))
        registry.leave(ask.leave(2, reason="exit code 3"))
        problem = check(await client.post("/v1/groups", json={"job": "job", "ranks": [0, 1, 2]}), 503, "rank-failed")
        assert problem["ranks"] == [1, 2]
        assert "rank 2 (host2, pid 102) has failed (exit code 3)" in problem["detail"]
        assert agents.asked == []

    async def test_one_that_refuses_leaves_none_with_it(self, client, agents, eventually):
        agents.plays[2] = doubles.silent
        agents.plays[1] = doubles.problem(503, "not-ready", "the rank is leaving")
        problem = check(await client.post("/v1/groups", json={"job": "job", "ranks": [0, 1, 2]}), 502, "group-not-made")
        assert problem["ranks"] == [1]
        assert "the agent of rank 1 (host1, pid 101): the rank is leaving" in problem["detail"]
        assert agents.what("DELETE", "/v1/groups/00000000000000cc") == agents.what("DELETE")
        assert agents.what("DELETE") in ([0], []), "rank 0 may have been cut off before it answered"

    async def test_one_that_does_not_answer(self, client, agents, monkeypatch):
        agents.plays[1] = doubles.silent
        for seconds in (0.2, 10.0):  # on a busy machine, rank 0 may need more than the first
            monkeypatch.setattr(group_controller, "_NETWORK_SECONDS", seconds)
            answer = await client.post("/v1/groups", json={"job": "job", "ranks": [0, 1], "timeout": 0.1})
            problem = check(answer, 502, "group-not-made")
            if agents.what("DELETE"):
                break
        assert problem["ranks"] == [1]
        assert agents.what("DELETE") == [0]


class TestAbort:
    async def test_all_members_are_asked(self, client, agents):
        answer = await client.post("/v1/groups/pair/abort", json={"reason": "it hangs"})
        assert answer.json() == {"id": PAIR, "name": "pair", "asked": [0, 1], "answered": [0, 1], "failed": []}
        assert [document for _, _, _, document in agents.asked] == [{"reason": "it hangs"}] * 2
        assert agents.what("POST", f"/v1/groups/{PAIR}/abort") == [0, 1]

    async def test_without_a_reason(self, client):
        assert (await client.post("/v1/groups/pair/abort")).status_code == 200

    async def test_one_that_is_dead(self, client, agents):
        agents.plays[0] = doubles.problem(500, "internal-error", "a bug")
        answer = await client.post("/v1/groups/pair/abort", json={})
        assert answer.json()["answered"] == [1]
        assert answer.json()["failed"] == [{"rank": 0, "detail": "a bug"}]

    async def test_one_that_does_not_have_it_any_more(self, client, agents):
        agents.plays[0] = doubles.problem(404, "group-not-found", "no")
        assert (await client.post("/v1/groups/pair/abort")).json()["answered"] == [0, 1]

    async def test_nobody_answers(self, client, agents):
        agents.plays |= dict.fromkeys((0, 1), doubles.problem(500, "internal-error", "a bug"))
        problem = check(await client.post("/v1/groups/pair/abort"), 502, "no-agent-answered")
        assert "rank 0: a bug; rank 1: a bug" in problem["detail"]

    async def test_of_nobody(self, client):
        check(await client.post("/v1/groups/nobody/abort"), 404, "group-not-found")


class TestShrink:
    async def test_one_is_left_out(self, client, agents):
        answer = (await client.post("/v1/groups/pair/shrink", json={"without": [0]})).json()
        assert (answer["made"]["name"], answer["made"]["ranks"]) == ("pair-2", [1])
        assert answer["ended"] == {"id": PAIR, "name": "pair", "asked": [0, 1], "answered": [0, 1], "failed": []}
        assert agents.what("POST", "/v1/groups") == [1]
        assert agents.what("DELETE", PAIR) == [0, 1]

    async def test_those_that_failed_are_left_out_in_any_case(self, client, agents, clock, beat):
        clock.advance(FAILED_SECONDS)
        beat(0, 2, 3)
        answer = (await client.post("/v1/groups/pair/shrink")).json()
        assert answer["made"]["ranks"] == [0]
        assert answer["ended"]["asked"] == [0]

    async def test_a_group_of_the_sdk_is_aborted(self, client, agents):
        def in_use(method: str, path: str, document: Any) -> doubles.Answer:
            if method == "DELETE":
                return 409, {"code": "group-in-use", "detail": "its job ends it"}
            return agents.usual(method, path, document)

        agents.plays[1] = in_use
        answer = (await client.post("/v1/groups/pair/shrink", json={"without": [0]})).json()
        assert answer["ended"]["answered"] == [0, 1]
        assert agents.what("POST", "/abort") == [1]
        assert "it goes on with rank 1" in agents.asked[-1][3]["reason"]

    @pytest.mark.parametrize(
        ("without", "says"),
        [
            ([], "all 2 members of group 'pair' are live"),
            ([2], "rank 2 is not in group"),
            ([0, 1], "no member would be left"),
        ],
    )
    async def test_nonsense(self, client, agents, without, says):
        answer = await client.post("/v1/groups/pair/shrink", json={"without": without})
        assert says in check(answer, 422, "invalid-request")["detail"]
        assert agents.asked == []

    async def test_the_old_one_stays_if_there_is_no_new_one(self, client, agents):
        agents.plays[1] = doubles.problem(503, "not-ready", "no")
        check(await client.post("/v1/groups/pair/shrink", json={"without": [0]}), 502, "group-not-made")
        assert agents.what("DELETE") == []


class TestGrow:
    async def test_more_come_behind_the_members(self, client, agents):
        answer = (await client.post("/v1/groups/pair/grow", json={"with": [3]})).json()
        assert (answer["made"]["name"], answer["made"]["ranks"]) == ("pair-2", [0, 1, 3])
        assert answer["ended"]["answered"] == [0, 1]
        assert agents.what("POST", "/v1/groups") == [0, 1, 3]

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ({"with": [1, 2]}, "rank 1 is in group 'pair' already"),
            ({"with": [9]}, "rank 9 is not in the job"),
            ({"with": []}, "expected a list of length >= 1"),
            ({}, "body.with"),
        ],
    )
    async def test_nonsense(self, client, agents, body, says):
        answer = await client.post("/v1/groups/pair/grow", json=body)
        assert says in check(answer, 422, "invalid-request")["detail"]
        assert agents.asked == []
