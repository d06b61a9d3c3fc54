"""What other processes send cannot control the terminal on which it is printed."""

from __future__ import annotations

import pickle

import pytest
from support import overview

import rankmesh as dist
from rankmesh._cli.exit_codes import print_error
from rankmesh._cli.overview import Verdict, head, tables
from rankmesh._cli.tables import lines
from rankmesh._session.session import current
from rankmesh.launch import _say
from rankmesh_agent.wire.errors import DistNetworkError, GroupAbortedError, from_code

EVIL = "\x1b]0;title\x07\x9b2J\u202eevil"
SHOWN = "\ufffd]0;title\ufffd\ufffd2J\ufffdevil"


def test_names_and_reasons_in_status():
    found = {
        "gateway": {"id": "g", "version": EVIL, "uptime": 61.0},
        "ranks": [overview.rank(0, "failed", job=EVIL, host=EVIL, reason=f"{EVIL}\nall is well")],
        "agents": [overview.agent(EVIL)],
        "groups": [overview.group(name=EVIL, failure=EVIL, operations_rate=0.0, bytes_rate=0.0)],
        "inflight": [],
    }
    problem = overview.finding(f"rank 0 ({EVIL}) has failed: {EVIL}\nall is well", job=EVIL, kind="failed")
    text = lines([head(found, Verdict([problem], [EVIL]), f"http://{EVIL}"), *tables(found)])
    assert "\x1b" not in text
    assert f"has failed: {SHOWN}\ufffdall is well" in text


def test_an_error_that_quotes_another_process(capsys: pytest.CaptureFixture[str]):
    error = from_code("group-aborted", f"rank 1 gave up: {EVIL}\nsecond line")
    assert isinstance(error, GroupAbortedError)
    assert str(error) == error.message == f"rank 1 gave up: {SHOWN}\nsecond line"
    assert str(pickle.loads(pickle.dumps(error))) == error.message
    assert str(DistNetworkError(EVIL)) == SHOWN
    print_error(EVIL)
    _say(EVIL)
    assert capsys.readouterr().err == f"rankmesh: {SHOWN}\n[rankmesh] {SHOWN}\n"


def test_an_abort_from_a_peer(alone: None):
    group = dist.new_group([0])
    session = current()
    assert session is not None
    state = session.agent.group_registry.all()[-1].state
    state.on_abort(b'{"code": "group-aborted", "message": "\\u001b]0;title"}')
    with pytest.raises(GroupAbortedError, match="\ufffd]0;title"):
        dist.barrier(group=group)
