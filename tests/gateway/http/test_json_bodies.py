"""JSON as dataclasses: what is taken, and what is left to somebody more lenient."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from rankmesh_agent.wire.schemas import GroupInfo, Heartbeat, JoinRequest, LauncherHeartbeat, Leave
from rankmesh_gateway.http.asgi import read


def test_what_ranks_send(ask):
    for sent in (
        ask.join(1),
        ask.join_unassigned(1),
        ask.heartbeat(0, 2, GroupInfo("id", "world", [0, 1], 7, "shm", "", "")),
        ask.leave_unassigned(0, reason="ünïcode"),
        LauncherHeartbeat("job", 0, 2, "n0", -1, "ended", 3),
    ):
        assert read(type(sent), json.dumps(asdict(sent)).encode()) == sent


def test_a_whole_number_of_seconds(ask):
    taken = read(JoinRequest, json.dumps(asdict(ask.join(0)) | {"wait": 3}).encode())
    assert taken.wait == 3
    assert type(taken.wait) is float


def test_what_may_be_left_out(ask):
    sent = asdict(ask.join(0))
    del sent["wait"]
    assert read(JoinRequest, json.dumps(sent).encode()) == ask.join(0)


WRONG = {
    "a text for a number": {"world_size": "2"},
    "a truth value for a number": {"world_size": True},
    "a fraction for a number": {"world_size": 2.0},
    "nothing for a text": {"job": None},
    "a list for a dataclass": {"member": []},
    "something wrong further in": {"member": {"rank": 0}},
    "something that is not there": {"more": 1},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_not_one_to_the_letter(ask, wrong):
    with pytest.raises(TypeError):
        read(JoinRequest, json.dumps(asdict(ask.join(0)) | wrong).encode())


def test_a_word_that_is_none_of_those_allowed():
    sent = asdict(LauncherHeartbeat("job", 0, 2, "n0", -1, "ended", 3))
    for wrong in ("unwell", "", None, []):
        with pytest.raises(TypeError):
            read(LauncherHeartbeat, json.dumps(sent | {"state": wrong}).encode())


@pytest.mark.parametrize("text", [b"[]", b"{}", b"1", b"null", b'{"job": "a", "groups": [1]}'])
def test_json_of_another_structure(text):
    for kind in (Heartbeat, JoinRequest, Leave):
        with pytest.raises(TypeError):
            read(kind, text)


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"{'job': 1}", b"[" * 100_000 + b"]" * 100_000])
def test_text_that_is_not_json_or_nested_too_deeply(text):
    with pytest.raises((ValueError, RecursionError, TypeError)):
        read(Leave, text)
