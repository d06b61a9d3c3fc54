"""Membership over HTTP, through a real server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace

import pytest

from rankmesh_agent.wire.errors import GroupAbortedError, RankFailedError
from rankmesh_agent.wire.overlay import partners
from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    NO_NODE,
    STARTING,
    GroupInfo,
    HeartbeatReply,
    HostTable,
    LauncherHeartbeat,
    LauncherReply,
)
from rankmesh_gateway.http.replies import SharedReplies

pytestmark = pytest.mark.anyio


async def test_four_clients_join_at_once(client, ask):
    answers = await asyncio.gather(*(client.post("/v1/join", json=asdict(ask.join(rank, 4))) for rank in range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    reply = answers[0].json()
    assert (reply["complete"], reply["epoch"], reply["missing"]) == (True, 1, [])
    assert reply["members"] == [asdict(ask.member(rank)) for rank in range(4)]


async def test_a_slice_that_ran_out_says_who_is_missing(client, ask, registry):
    answer = await client.post("/v1/join", json=asdict(ask.join(1, 3, wait=0.01)))
    assert answer.status_code == 200
    assert (answer.json()["complete"], answer.json()["missing"]) == (False, [0, 2])
    assert len(registry.ranks()) == 1
    again = asyncio.create_task(client.post("/v1/join", json=asdict(ask.join(1, 3))))
    for rank, wait in ((0, -1), (2, 0)):
        await client.post("/v1/join", json=asdict(ask.join(rank, 3, wait=wait)))
    assert (await again).json()["complete"]


async def test_a_joiner_whose_connection_breaks_frees_its_rank(raw_post, ask, registry, eventually):
    with raw_post("/v1/join", ask.join(0)):
        eventually(lambda: len(registry.ranks()) == 1)
    eventually(lambda: registry.ranks() == [])


@pytest.mark.parametrize("state", ["failed", "unwell"])
async def test_launchers_agree_on_a_restart(client, state):
    beat = LauncherHeartbeat("job", 0, 2, "n0", 0, "running", 1)
    answer = await client.post("/v1/launchers", json=asdict(beat))
    assert (answer.status_code, LauncherReply(**answer.json())) == (200, LauncherReply(0, False, 0, 2))
    answer = await client.post("/v1/launchers", json=asdict(beat) | {"state": state})
    if state == "failed":
        reply = LauncherReply(**answer.json())
        assert (answer.status_code, reply.attempt, reply.over, reply.nodes) == (200, 1, False, 0)
    else:
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    answer = await client.post("/v1/launchers", json=asdict(beat) | {"node": 2})
    assert "node 2 is not in a job of 2" in answer.json()["detail"]


@pytest.mark.parametrize("lost", [False, True])
async def test_ranks_are_told_of_a_change_of_the_nodes(client, ask, clock, registry, lost):
    for rank in range(2):
        await client.post("/v1/join", json=asdict(ask.join(rank, wait=0)))
    beats = [
        LauncherHeartbeat("job", node, 3, f"n{node}", 0, "running", 1, 1, 1, attempt_nodes=2, host=f"host{node}")
        for node in range(2)
    ]
    for beat in beats:
        await client.post("/v1/launchers", json=asdict(beat))
    if lost:
        beats[1] = replace(beats[1], state="stopped")
        reason = "node 1 (host1) has left"
    else:
        beats.append(LauncherHeartbeat("job", NO_NODE, 3, "n2", STARTING, "waiting", 1, 1, 1, host="host2"))
        reason = "node host2 joins: the job starts again with 3 nodes"
    for beat in beats:
        await client.post("/v1/launchers", json=asdict(beat))
    assert (await client.post("/v1/heartbeat", json=asdict(ask.heartbeat(0)))).json() == {"failed": []}, "not all know"
    for beat in beats:
        await client.post("/v1/launchers", json=asdict(beat))
    answer = (await client.post("/v1/heartbeat", json=asdict(ask.heartbeat(0)))).json()
    assert answer == {"failed": [], "restart": reason, "lost_ranks": [1] if lost else []}
    error = HeartbeatReply(**answer).restart_error()
    assert (type(error), error.ranks) == ((RankFailedError, (1,)) if lost else (GroupAbortedError, ()))
    await client.post("/v1/join", json=asdict(ask.join(0, life=2, attempt=1, wait=0)))
    assert (await client.post("/v1/heartbeat", json=asdict(ask.heartbeat(0)))).json() == answer, "its epoch has ended"
    events = registry.events.since(registry.events.resume_position(0))
    (event,) = [json.loads(event.data) for event in events if event.kind == "job-restarted"]
    assert event["detail"] == f"all ranks of job 'job' start again: restart 1, {reason}"


async def test_a_closed_registry_sends_everyone_away(client, ask, registry, eventually):
    waiting = asyncio.create_task(client.post("/v1/join", json=asdict(ask.join(0))))
    await asyncio.to_thread(eventually, lambda: registry.counts().ranks == 1)
    registry.close()
    late = client.post("/v1/join", json=asdict(ask.join(1)))
    beat = client.post("/v1/heartbeat", json=asdict(ask.heartbeat(0)))
    for answer in (await waiting, await late, await beat):
        assert (answer.status_code, answer.json()["code"]) == (503, "gateway-closing")
        assert answer.headers["connection"] == "close", "the next request is to find the next gateway"


async def test_a_life(client, ask, clock):
    group = GroupInfo("00000000000000aa", "world", [0, 1], 3, "tcp", "barrier #2", "")
    for rank in range(2):
        await client.post("/v1/join", json=asdict(ask.join(rank, wait=0)))
    clock.advance(FAILED_SECONDS)
    beat = await client.post("/v1/heartbeat", json=asdict(ask.heartbeat(0, 2, group)))
    assert beat.json() == {"failed": [1]}
    groups = (await client.get("/v1/groups", params={"job": "job"})).json()
    assert [(found["name"], found["seqs"]) for found in groups] == [("world", {"0": 3})]
    assert (await client.post("/v1/leave", json=asdict(ask.leave(0)))).json() == {"ok": True}
    ranks = (await client.get("/v1/ranks")).json()
    assert [(rank["member"]["rank"], rank["state"]) for rank in ranks] == [(0, "left"), (1, "failed")]
    assert (await client.get("/v1/ranks", params={"job": "other"})).json() == []


def test_the_encoded_reply_of_a_world_is_kept_as_long_as_the_reply(registry, ask):
    for rank in range(2):
        joined = registry.join(ask.join(rank))
    kept, reply = SharedReplies(), replace(joined.result(timeout=0))
    assert kept.encoded(reply) is kept.encoded(reply)
    del reply
    assert not kept._replies


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_a_large_world_gets_one_table_and_each_rank_its_partners(client, ask, registry, encoding):
    size = 600
    waiting = [registry.join(ask.join(rank, size)) for rank in range(size - 3)]
    headers = {"accept-encoding": encoding}
    last = (client.post("/v1/join", json=asdict(ask.join(size - n, size)), headers=headers) for n in (3, 2, 1))
    answers = await asyncio.gather(*last)
    assert [answer.headers.get("content-encoding", "identity") for answer in answers] == [encoding] * 3
    whole = waiting[0].result(timeout=20)
    assert all(future.result(timeout=20) is whole for future in waiting)
    assert whole.members == [ask.member(rank) for rank in range(size)]
    for rank, answer in zip((597, 598, 599), answers, strict=True):
        listed = sorted([rank, *partners(rank, size, 0)])
        assert len(listed) < 25
        assert answer.json() == asdict(whole) | {"members": [asdict(ask.member(each)) for each in listed]}
        assert HostTable(**answer.json()["hosts"]) == whole.hosts
    assert [each.pid for each in whole.hosts.processes()] == [100 + rank for rank in range(size)]


async def test_members_by_rank(client, ask, registry):
    for rank in range(4):
        registry.join(ask.join(rank, 4))
    wanted = {"job": "job", "epoch": 1, "ranks": [3, 1, 4]}
    assert (await client.post("/v1/members", json=wanted)).json() == [asdict(ask.member(rank)) for rank in (3, 1)]
    for other in ({"job": "another"}, {"epoch": 2}):
        assert (await client.post("/v1/members", json=wanted | other)).json() == []


async def test_ranks_that_have_ended(client, ask, registry):
    for rank in range(4):
        registry.join(ask.join(rank, 4))
    registry.leave(ask.leave(3))
    registry.leave(ask.leave(1, reason="exit code 1"))
    answer = await client.post("/v1/ended", json={"job": "job", "epoch": 1})
    assert [(rank["member"]["rank"], rank["state"], rank["reason"]) for rank in answer.json()] == [
        (1, "failed", "exit code 1"),
        (3, "left", ""),
    ]
    for other in ({"job": "another", "epoch": 1}, {"job": "job", "epoch": 2}):
        assert (await client.post("/v1/ended", json=other)).json() == []


async def test_a_heartbeat_that_the_framework_reads_gets_the_same_reply(client, ask, registry):
    lenient = {"content-type": "application/json; charset=utf-8"}
    body = json.dumps(asdict(ask.heartbeat(0)))
    for headers in ({"content-type": "application/json"}, lenient):
        assert (await client.post("/v1/heartbeat", content=body, headers=headers)).json() == {"failed": []}
