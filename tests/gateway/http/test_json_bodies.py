"""JSON as dataclasses: what is read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.fields import MAX_ADDRESSES, MAX_NAME, MAX_REASON, MAX_WORLD_SIZE
from rankmesh_agent.wire.json_text import InvalidBodyError, convert, read
from rankmesh_agent.wire.schemas import (
    MAX_LEASES,
    GroupInfo,
    Heartbeat,
    JoinRequest,
    LauncherHeartbeat,
    Lease,
    Leave,
    RankInfo,
)


def test_what_ranks_send(ask):
    for sent in (
        ask.join(1),
        ask.join_unassigned(1),
        ask.join(0, job="j" * MAX_NAME),
        ask.heartbeat(0, 2, GroupInfo("id", "world", [0, 1], 7, "shm", "", "")),
        ask.leave_unassigned(0, reason="ünïcode"),
        ask.leave_unassigned(0, reason="a file's name: \udcff"),
        LauncherHeartbeat("job", 0, 2, "n0", -1, "ended", 3),
    ):
        assert read(type(sent), json_text.encode(sent)) == read(type(sent), json.dumps(asdict(sent)).encode()) == sent


@pytest.mark.parametrize("change", [{"wait": 20}, {"world_size": 2.0}, {"more": 1}], ids=str)
def test_a_whole_number_of_either_kind_and_a_member_that_is_not_known(ask, change):
    taken = read(JoinRequest, json.dumps(asdict(ask.join(0, wait=20.0)) | change).encode())
    assert taken == ask.join(0, wait=20.0)
    assert (type(taken.wait), type(taken.world_size)) == (float, int)


def test_what_may_be_left_out(ask):
    sent = asdict(ask.join(0))
    del sent["wait"]
    assert read(JoinRequest, json.dumps(sent).encode()) == ask.join(0)


def test_a_list_of_dataclasses(ask):
    ranks = [RankInfo("job", 1, "alive", 0.5, "", ask.member(rank)) for rank in range(2)]
    assert read(list[RankInfo], json_text.encode(ranks)) == ranks


WHOLE = "expected a number without a fraction"
STRING = "expected a string of length"
LIST = "expected a list of length"
LONG, TEXT = "x" * (MAX_NAME + 1), "x" * (MAX_REASON + 1)
WRONG = [
    # the body, the change, the field, the error
    ("join", {"world_size": "2"}, "world_size", f"{WHOLE}, got a string"),
    ("join", {"world_size": True}, "world_size", f"{WHOLE}, got true or false"),
    ("join", {"world_size": 2.5}, "world_size", f"{WHOLE}, got a number"),
    ("join", {"world_size": 0}, "world_size", f"{WHOLE} >= 1"),
    ("join", {"world_size": MAX_WORLD_SIZE + 1}, "world_size", f"{WHOLE} <= {1 << 16}"),
    ("join", {"job": None}, "job", "expected a string, got null"),
    ("join", {"job": ""}, "job", f"{STRING} >= 1"),
    ("join", {"job": " "}, "job", r"expected a string matching regex '\\S'"),
    ("join", {"job": LONG}, "job", f"{STRING} <= 255"),
    ("join", {"member": []}, "member", "expected a JSON object, got a list"),
    ("join", {"member": {"rank": 0}}, "member.instance", "is missing"),
    ("join", {"growth": 3}, "growth", "expected a JSON object or null, got a number without a fraction"),
    ("join", {"growth": {"epoch": 0, "size": 1, "group": ""}}, "growth.epoch", f"{WHOLE} >= 1"),
    ("join", {"growth": {"epoch": 1, "size": 1, "group": LONG}}, "growth.group", f"{STRING} <= 255"),
    ("join", {"attempt": 1 << 63}, "attempt", f"{WHOLE} <= {(1 << 63) - 1}"),
    ("join", {"ancestors": [1] * (MAX_ADDRESSES + 1)}, "ancestors", f"{LIST} <= 64"),
    ("member", {"rank": -2}, "member.rank", f"{WHOLE} >= -1"),
    ("member", {"instance": ""}, "member.instance", f"{STRING} >= 1"),
    ("member", {"http": LONG}, "member.http", f"{STRING} <= 255"),
    ("member", {"transport": LONG}, "member.transport", f"{STRING} <= 255"),
    ("member", {"addresses": [LONG]}, "member.addresses[0]", f"{STRING} <= 255"),
    ("member", {"addresses": ["a:1"] * (MAX_ADDRESSES + 1)}, "member.addresses", f"{LIST} <= 64"),
    ("heartbeat", {"epoch": 0}, "epoch", f"{WHOLE} >= 1"),
    ("agent", {"name": " "}, "name", r"expected a string matching regex '\\S'"),
    ("agent", {"urls": []}, "urls", f"{LIST} >= 1"),
    ("agent", {"urls": ["u"] * (MAX_ADDRESSES + 1)}, "urls", f"{LIST} <= 64"),
    ("agent", {"leases": [Lease("l", "job", 0, 1, "")] * (MAX_LEASES + 1)}, "leases", f"{LIST} <= 16"),
    ("agent", {"leases": [Lease("", "job", 0, 1, "")]}, "leases[0].id", f"{STRING} >= 1"),
    ("agent", {"leases": [Lease("l", "job", 0, 1, TEXT)]}, "leases[0].holder", f"{STRING} <= 4096"),
    ("lease", {"host_id": LONG}, "host_id", f"{STRING} <= 255"),
    ("lease", {"world_size": 0}, "world_size", f"{WHOLE} >= 1"),
]


@pytest.mark.parametrize(
    ("kind", "change", "field", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_value_that_is_refused(ask, kind, change, field, text):
    if kind == "member":
        kind, change = "join", {"member": replace(ask.member(0), **change)}
    sent = getattr(ask, kind)(0)
    with pytest.raises(InvalidBodyError) as caught:
        read(type(sent), json_text.encode(asdict(sent) | change))
    assert str(caught.value) == f"body.{field}: {text}"


def test_a_word_that_is_none_of_those_allowed():
    sent = asdict(LauncherHeartbeat("job", 0, 2, "n0", -1, "ended", 3))
    for wrong in ("unwell", "", None, []):
        with pytest.raises(InvalidBodyError, match=r"body\.state: "):
            read(LauncherHeartbeat, json.dumps(sent | {"state": wrong}).encode())


@pytest.mark.parametrize("text", [b"[]", b"{}", b"1", b"null", b'{"job": "a", "groups": [1]}'])
def test_json_of_another_structure(text):
    for kind in (Heartbeat, JoinRequest, Leave):
        with pytest.raises(InvalidBodyError, match=r"^body"):
            read(kind, text)
        with pytest.raises(InvalidBodyError, match=r"^body"):
            convert(kind, json.loads(text))


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"{'job': 1}", b"[" * 100_000 + b"]" * 100_000, b"[NaN]"])
def test_text_that_is_not_json_or_nested_too_deeply(text):
    with pytest.raises(ValueError, match=r"."):
        read(Leave, text)
