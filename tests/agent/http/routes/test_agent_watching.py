"""Watching an agent over HTTP: what is in flight, the flight recorder, the stacks."""

from __future__ import annotations

import threading

import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("group", ["world", "00000000000000aa"])
async def test_a_group_is_known_by_its_name_or_id(client, group):
    answer = await client.get(f"/v1/groups/{group}/inflight")
    assert answer.json()[0] == {"op": "barrier()", "seq": 3, "age": 1.5, "bytes": 0}
    assert [each["seq"] for each in answer.json()] == [3, 4, 0]


async def test_a_group_may_have_nothing_in_flight(client):
    assert (await client.get("/v1/groups/pair/inflight")).json() == []


async def test_the_flight_recorder_is_asked_for_a_group_and_so_many(client, agent):
    found = (await client.get("/v1/flight-recorder")).json()
    assert agent.asked == (None, None)
    assert [(each["call"], each["state"], each["error"], each["end"]) for each in found] == [
        ("send to rank 3 (tag 7)", "failed", "Oh", 1.75e9 + 1),
        ("barrier()", "in-flight", "", None),
    ]
    await client.get("/v1/flight-recorder", params={"group": "world", "last": 5})
    assert agent.asked == ("world", 5)


async def test_stacks_show_every_thread_and_where_it_is(client):
    told, waiting = threading.Event(), threading.Event()

    def wait_to_be_told() -> None:
        waiting.set()
        told.wait(20)

    thread = threading.Thread(target=wait_to_be_told, name="patient")
    thread.start()
    assert waiting.wait(20)
    try:
        found = (await client.get("/v1/stacks")).json()
        text = await client.get("/v1/stacks", headers={"Accept": "text/plain"})
    finally:
        told.set()
        thread.join()
    assert found[0]["name"] == "MainThread"
    (patient,) = [each for each in found if each["name"] == "patient"]
    assert (patient["ident"], patient["native_id"], patient["daemon"]) == (thread.ident, thread.native_id, False)
    (frame,) = [each for each in patient["frames"] if each["file"] == __file__]
    assert frame["function"].endswith("wait_to_be_told")
    assert frame["code"] == "told.wait(20)"
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert f"Thread 'patient' (id {thread.native_id}):\n" in text.text
    assert f'  File "{__file__}", line {frame["line"]}, in ' in text.text
    assert "    told.wait(20)\n" in text.text


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("text/plain", "text/plain; charset=utf-8"),
        ("text/*", "text/plain; charset=utf-8"),
        ("text/plain;q=0.5, application/json", "application/json"),
        ("TEXT/PLAIN; q=1.0, */*;q=0.1", "text/plain; charset=utf-8"),
        ("image/png", "application/json"),
        (",;,", "application/json"),
    ],
)
async def test_stacks_come_as_the_client_prefers(client, accept, kind):
    answer = await client.get("/v1/stacks", headers={"Accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
