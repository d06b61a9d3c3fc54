"""``rankmesh status`` and ``rankmesh groups``, of gateways that say what they are told to say, and of a real job."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.command import COMMAND, Double, Job, environment, here, member
from support.processes import free_port

pytestmark = pytest.mark.processes

Overview = Callable[..., dict[str, Any]]
PATH = "/v1/overview"

PLAIN = """\
gateway {url}, RankMesh 0.1.0, up 61.0 s; 12.3 calls/s, 2.5 MB/s
  all is well

Ranks of train-1, epoch 1
  rank  host   pid  state    heard  agent
     0  host0  100  alive  300 ms ago  http://10.0.0.0:8000
     1  host1  101  alive  300 ms ago  http://10.0.0.1:8001

Agents
  name     host   pid  state       heard  url                   leased to
  agent-7  host7    7  free   100 ms ago  http://10.0.0.7:8701

Groups
  group  ranks  medium  calls  calls/s   bytes/s
  world  0-1    shm     41-42     12.3  2.5 MB/s

In flight
  group  call  operation                       age  bytes  arrived  missing
  world   #41  all_reduce(sum, float32 x 10)  2.5 s   40 B  0        1
"""


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_plain_where_there_is_no_terminal(double: Double, overview: Overview):
    double.answers[PATH] = overview()
    code, stdout, stderr = here("status", "--gateway", double.url)
    assert (code, stderr) == (0, "")
    assert words(stdout) == words(PLAIN.format(url=double.url))
    assert not any(line.endswith(" ") for line in stdout.splitlines())
    assert "\x1b" not in stdout


def test_the_document_is_the_gateways(double: Double, overview: Overview):
    double.answers[PATH] = overview()
    done = here("status", "--gateway", double.url, "--json")
    assert (done.code, done.stderr) == (0, "")
    assert done.document == {"ok": True, "complaints": [], "url": double.url, **overview()}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"state": "failed", "reason": "killed by SIGKILL"}, "is failed: killed by SIGKILL"),
        ({"state": "suspect", "heartbeat_age": 4.2}, "is suspect: last heard 4.2 s ago"),
    ],
    ids=["failed", "suspect"],
)
def test_a_rank_that_is_not_well(double: Double, overview: Overview, changes: dict[str, Any], complaint: str):
    said = overview()
    said["ranks"][1].update(changes)
    double.answers[PATH] = said
    who = "rank 1 of job train-1 (host1, pid 101)"
    code, stdout, _ = here("status", "--gateway", double.url)
    assert code == 1
    assert f"{who} {complaint}" in stdout
    done = here("status", "--gateway", double.url, "--json")
    assert (done.code, done.document["ok"], done.document["complaints"]) == (1, False, [f"{who} {complaint}"])
    assert here("status", "--gateway", double.url, "--job", "another").code == 0


def test_an_agent_and_a_group_that_are_not_well(double: Double, overview: Overview):
    said = overview()
    said["agents"][0]["state"] = "failed"
    said["groups"][0]["failure"] = "rank 1 failed"
    double.answers[PATH] = said
    code, stdout, _ = here("status", "--gateway", double.url)
    assert code == 1
    assert "agent agent-7 on host7 is failed" in stdout
    assert "group world of job train-1: rank 1 failed" in stdout


def test_nothing_is_there(double: Double, overview: Overview):
    double.answers[PATH] = overview(ranks=[], agents=[], groups=[], inflight=[])
    code, stdout, _ = here("status", "--gateway", double.url)
    assert code == 0
    assert "none; 'rankmesh run' starts some" in stdout


def test_names_cannot_drive_the_terminal(double: Double, overview: Overview):
    said = overview()
    said["ranks"][0]["member"] = member(0, host="\x1b]0;title\x07\x9b2J[bold]evil[/bold]\n")
    double.answers[PATH] = said
    stdout = here("status", "--gateway", double.url).stdout
    assert "\ufffd]0;title\ufffd\ufffd2J[bold]evil[/bold]\ufffd" in stdout
    _, screen = on_a_terminal(["status", "--gateway", double.url, "--once"])
    assert b"]0;title" in screen
    assert b"\x1b]0" not in screen
    assert b"[bold]evil" in screen


def test_an_older_gateway(double: Double):
    code, stdout, stderr = here("status", "--gateway", double.url)
    assert (code, stdout) == (5, "")
    assert "does not know GET /v1/overview: it is of an older version than this command; upgrade" in stderr


def test_a_gateway_that_says_something_else(double: Double):
    double.answers[PATH] = {"ranks": 5}
    code, stdout, stderr = here("status", "--gateway", double.url)
    assert (code, stdout) == (5, "")
    assert "their versions differ" in stderr


@pytest.mark.parametrize("command", ["status", "groups", "doctor"])
def test_nobody_is_there(command: str):
    code, _, stderr = here(command, "--gateway", f"127.0.0.1:{free_port()}", "--json")
    assert code == 3
    assert stderr.startswith("rankmesh: no gateway answers at")
    assert stderr.count("\n") == 1


def on_a_terminal(
    arguments: list[str], until: bytes = b"", then: Callable[[], None] = lambda: None
) -> tuple[int, bytes]:
    """Run a command on a terminal; when it has shown something, call a function, and then press Ctrl-C."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm-256color", COLUMNS="200", LINES="50"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as command:
        os.close(theirs)
        seen, end, pressed = b"", time.monotonic() + 60, False
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    piece = os.read(ours, 1 << 16)
                except OSError:  # the command has ended, and its end of the terminal with it
                    break
                if not piece:
                    break
                seen += piece
            if until and until in seen and not pressed:
                pressed = True
                then()
                command.send_signal(signal.SIGINT)
        try:
            return command.wait(60), seen
        except subprocess.TimeoutExpired:
            command.kill()
            raise
        finally:
            os.close(ours)


def test_live_on_a_terminal(double: Double, overview: Overview):
    double.answers[PATH] = overview()
    code, screen = on_a_terminal(
        ["status", "--gateway", double.url, "--interval", "0.1"], b"all_reduce", lambda: wait_for_asks(double, 3)
    )
    assert code == 0, screen
    assert b"Traceback" not in screen
    assert len(double.asked) >= 3


def wait_for_asks(double: Double, count: int) -> None:
    end = time.monotonic() + 30
    while len(double.asked) < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_live_goes_on_while_the_gateway_is_away(double: Double, overview: Overview):
    double.answers[PATH] = overview()

    def go_away() -> None:
        double.gone = True
        wait_for_asks(double, len(double.asked) + 3)

    code, screen = on_a_terminal(["status", "--gateway", double.url, "--interval", "0.1"], b"all_reduce", go_away)
    assert code == 0, screen
    assert b"NO ANSWER since" in screen


def test_groups(double: Double, overview: Overview):
    double.answers[PATH] = overview()
    code, stdout, _ = here("groups", "--gateway", double.url)
    assert code == 0
    assert words(stdout)[1:] == [
        ["group", "ranks", "medium", "calls", "calls/s", "bytes/s"],
        ["world", "0-1", "shm", "41-42", "12.3", "2.5", "MB/s"],
    ]
    assert here("groups", "--gateway", double.url, "--json").document == overview()["groups"]


@pytest.mark.parametrize("name", ["world", "00000000000000aa"])
def test_one_group(double: Double, overview: Overview, name: str):
    double.answers[PATH] = overview()
    code, stdout, _ = here("groups", name, "--gateway", double.url)
    assert code == 0
    assert ["1", "host1", "alive", "41"] in words(stdout)
    assert any("missing" in line for line in words(stdout))
    said = here("groups", name, "--gateway", double.url, "--json").document
    assert said == {**overview()["groups"][0], "inflight": overview()["inflight"]}


def test_a_group_that_is_not_there(double: Double, overview: Overview):
    double.answers[PATH] = overview()
    done = here("groups", "pair", "--gateway", double.url)
    assert done == (1, "", "rankmesh: there is no group 'pair'; there are: world\n")


def test_a_name_that_several_groups_have(double: Double, overview: Overview):
    groups = overview()["groups"]
    double.answers[PATH] = overview(groups=[*groups, {**groups[0], "id": "00000000000000bb", "job": "train-2"}])
    code, stdout, stderr = here("groups", "world", "--gateway", double.url)
    assert (code, stdout) == (2, "")
    assert "00000000000000bb (train-2, epoch 1)" in stderr
    assert here("groups", "world", "--gateway", double.url, "--job", "train-2").code == 0


def test_a_real_job(job: Job):
    done = job.here("status", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert [each["member"]["rank"] for each in done.document["ranks"]] == [0, 1, 2]
    assert {each["name"] for each in done.document["groups"]} >= {"world"}
    code, stdout, _ = job.here("groups", "world")
    assert code == 0
    assert stdout.count("alive") == 3
    code, stdout, stderr = here("status", "--gateway", job.url, RANKMESH_TOKEN="another")
    assert (code, stdout) == (4, "")
    assert stderr.count("\n") == 1
