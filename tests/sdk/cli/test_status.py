"""``rankmesh status`` and ``rankmesh groups`` of a gateway's double and of a real job."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support import overview as made_up
from support.command import COMMAND, Done, Double, Job, environment, here, until_it_fits
from support.processes import free_port, wait_until

pytestmark = pytest.mark.processes

Overview = Callable[..., dict[str, Any]]
Gateway = Callable[..., Done]
PATH = "/v1/overview"

PLAIN = """\
gateway {url}, RankMesh 0.1.0, up 61.0 s; 12.3 calls/s, 2.5 MB/s
  all is well

Ranks of train-1, epoch 1
  rank  host     pid  state    heard  agent
     0  host-0  4000  alive  400 ms ago  http://127.0.0.1:8000
     1  host-1  4001  alive  400 ms ago  http://127.0.0.1:8001

Agents
  name     host           pid  state       heard  url                    leased to
  agent-7  agent-7.local    1  free   200 ms ago  http://127.0.0.1:8701

Groups
  group  ranks  medium  calls  calls/s   bytes/s
  world  0-1    shm     41-42     12.3  2.5 MB/s

In flight
  group  call  operation                         age   bytes  arrived  missing
  world  #103  all_reduce(sum, float32 x 1024)  2.5 s  4.1 kB  0        1
"""
HELD_UP = "all_reduce(sum, float32 x 1024) #103 in group world of job train-1 has been held up for 16.0 s"


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def gateway(double: Double, overview: Overview) -> Callable[..., Done]:
    """Serves an overview with some changes, and runs a command about it in this process."""

    def run(*arguments: str, findings: Sequence[dict[str, Any]] = (), **changes: Any) -> Done:
        double.answers |= {PATH: overview(**changes), "/v1/diagnosis": {"findings": findings}}
        return here(*arguments, "--gateway", double.url)

    return run


def test_plain_text_without_a_terminal(double: Double, gateway: Gateway):
    code, stdout, stderr = gateway("status")
    assert (code, stderr) == (0, "")
    assert words(stdout) == words(PLAIN.format(url=double.url))
    assert not any(line.endswith(" ") for line in stdout.splitlines())
    assert "\x1b" not in stdout


def test_the_document_is_the_gateways(double: Double, gateway: Gateway, overview: Overview):
    done = gateway("status", "--json")
    assert (done.code, done.stderr) == (0, "")
    ours = {"ok": True, "complaints": [], "remarks": [], "findings": [], "url": double.url}
    assert done.document == {**ours, **overview()}


@pytest.mark.parametrize(
    ("part", "change", "complaint"),
    [
        (
            "ranks",
            {"state": "failed", "reason": "killed"},
            "rank 1 (host-1, pid 4001) has failed: killed",
        ),
        (
            "ranks",
            {"state": "suspect", "heartbeat_age": 4.2},
            "rank 1 (host-1, pid 4001) of job train-1 is suspect: no heartbeat for 4.2 s",
        ),
        ("agents", {"state": "failed"}, "agent agent-7 on agent-7.local has failed: no heartbeat for 200 ms"),
        ("groups", {"failure": "rank 1 failed"}, "group world of job train-1 has failed: rank 1 failed"),
        ("inflight", {"age": 16.0, "held_up": True}, f"{HELD_UP} by rank 1 (host-1, pid 4001, alive)"),
        ("inflight", {"age": 16.0, "missing": [1, 2, 3]}, f"{HELD_UP} by 3 ranks, 1-3"),
    ],
    ids=["failed", "suspect", "agent", "group", "held up", "held up, of an earlier gateway"],
)
def test_problems(gateway: Gateway, overview: Overview, part: str, change: dict[str, Any], complaint: str):
    changed = overview()[part]
    changed[-1].update(change)
    code, stdout, _ = gateway("status", **{part: changed})
    assert code == 1
    assert complaint in stdout
    done = gateway("status", "--json", **{part: changed})
    assert (done.code, done.document["ok"], done.document["complaints"]) == (1, False, [complaint])


def test_the_cause_of_a_failure_comes_first(gateway: Gateway, overview: Overview):
    ranks = [made_up.rank(each, job="train-1") for each in range(4)]
    ranks[0].update(state="failed", reason="rank 2 failed", failed_ranks=[2], heartbeat_age=4.0)
    ranks[1].update(state="failed", reason="rank 2 failed", failed_ranks=[2, 3], heartbeat_age=3.0)
    ranks[2].update(state="failed", reason="ValueError: no more data", heartbeat_age=3.5)
    failed = overview()["groups"]
    failed[0]["failure"] = "rank 2 failed"
    done = gateway("status", "--json", ranks=ranks, groups=failed)
    assert done.document["complaints"] == [
        "rank 2 (host-0, pid 4002) has failed: ValueError: no more data; ranks 0-1 failed because of it"
    ]
    (finding,) = done.document["findings"]
    assert (finding["kind"], finding["ranks"]) == ("failed", [2])


FINDING = made_up.finding("rank 2 has not come to all_reduce #3 for 12.0 s", job="train-1")
YOUNG = made_up.finding("rank 2 has not come to all_reduce #3 for 5.8 s", job="train-1", young=True)


@pytest.mark.parametrize("finding", [FINDING, YOUNG], ids=["old", "young"])
def test_a_finding_of_diagnose_is_a_problem(gateway: Gateway, overview: Overview, finding: dict[str, Any]):
    """And the only one: the operation that is held up, and the ranks that it names, are the same."""
    ranks = [made_up.rank(each, job="train-1") for each in range(3)]
    ranks[2].update(state="suspect", heartbeat_age=4.0)
    calls = overview()["inflight"]
    calls[0].update(age=16.0, held_up=True)
    code, stdout, _ = gateway("status", ranks=ranks, inflight=calls, findings=[finding])
    assert (code, "all is well" in stdout) == (1, False)
    done = gateway("status", "--json", ranks=ranks, inflight=calls, findings=[finding])
    text = finding["text"] + ("; the wait is young, and may be a slow step" if finding["young"] else "")
    assert (done.document["complaints"], done.document["findings"]) == ([text], [finding])


def test_only_the_newest_epoch_counts(gateway: Gateway, overview: Overview):
    ranks = [*overview()["ranks"], made_up.rank(0, job="train-1", epoch=2), made_up.rank(1, job="train-1", epoch=2)]
    ranks[0].update(state="failed", reason="killed")
    failed = overview()["groups"]
    failed[0]["failure"] = "rank 0 failed"
    assert gateway("status", ranks=ranks, groups=failed, inflight=[]).code == 0


def test_a_rank_that_the_others_wait_for_is_named(gateway: Gateway, overview: Overview):
    groups = [made_up.group(ranks=4, job="train-1", busy={"0": 0.95, "1": 0.93, "2": 0.06, "3": 0.94})]
    code, stdout, _ = gateway("status", groups=groups)
    slowest = "the others wait for rank 2: it spends 6% of its time in the operations of group world of job train-1"
    assert (code, "all is well" in stdout, slowest in stdout) == (0, False, True)
    assert gateway("status", "--json", groups=groups).document["remarks"] == [f"{slowest}, they at least 93%"]
    groups[0]["busy"]["2"] = 0.5
    assert "all is well" in gateway("status", groups=groups).stdout


@pytest.mark.parametrize("command", ["status", "groups", "stacks", "diagnose", "doctor"])
def test_an_unknown_job(double: Double, overview: Overview, command: str):
    ranks = [*overview()["ranks"], made_up.rank(0, job="other")]
    health = {"status": "ok", "version": "0.1.0"}
    double.answers = {PATH: overview(ranks=ranks), "/v1/ranks": ranks, "/v1/agents": [], "/health": health}
    double.answers |= {"/v1/ranks/snapshots?job=another&patience=1.0": [], "/v1/jobs": ranks}
    code, stdout, stderr = here(command, "--job", "another", "--gateway", double.url, "--json")
    assert (code, stdout) == (1, "")
    assert stderr == f"rankmesh: the gateway at {double.url} has no job 'another'; there are: other, train-1\n"


def test_what_is_in_flight_and_not_held_up_is_no_problem(gateway: Gateway, overview: Overview):
    calls = overview()["inflight"]
    calls[0].update(age=16.0, missing=[])
    assert gateway("status", inflight=calls).code == 0
    calls[0].update(age=9.0, missing=[1], held_up=False)
    assert gateway("status", inflight=calls).code == 0


def test_the_age_of_call_counts(gateway: Gateway, overview: Overview):
    groups = overview()["groups"]
    groups[0]["ages"] = {"0": 0.2, "1": 0.8}
    _, stdout, _ = gateway("status", groups=groups)
    assert ["world", "0-1", "shm", "41-42", "800", "ms", "ago", "12.3", "2.5", "MB/s"] in words(stdout)
    _, stdout, _ = gateway("groups", "world", groups=groups)
    assert ["0", "host-0", "alive", "42", "200", "ms", "ago"] in words(stdout)


def test_nothing_is_there(gateway: Gateway):
    code, stdout, _ = gateway("status", ranks=[], agents=[], groups=[], inflight=[])
    assert code == 0
    assert "none; 'rankmesh run' starts some" in stdout


def test_names_cannot_drive_the_terminal(double: Double, gateway: Gateway, overview: Overview):
    ranks = overview()["ranks"]
    ranks[0]["member"]["host"] = "\x1b]0;title\x07\x9b2J[bold]evil[/bold]\n"
    assert "\ufffd]0;title\ufffd\ufffd2J[bold]evil[/bold]\ufffd" in gateway("status", ranks=ranks).stdout
    _, screen = on_a_terminal(["status", "--gateway", double.url, "--once"])
    assert b"]0;title" in screen
    assert b"\x1b]0" not in screen
    assert b"[bold]evil" in screen


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, "does not know GET /v1/overview: it is of an older version than this command; upgrade"),
        ({PATH: {"ranks": 5}}, "their versions differ"),
    ],
    ids=["older", "another form"],
)
def test_a_gateway_of_another_version(double: Double, answers: dict[str, Any], message: str):
    double.answers = answers
    code, stdout, stderr = here("status", "--gateway", double.url)
    assert (code, stdout) == (5, "")
    assert message in stderr


@pytest.mark.parametrize("command", ["status", "groups", "doctor"])
def test_no_gateway_answers(command: str):
    code, _, stderr = here(command, "--gateway", f"127.0.0.1:{free_port()}", "--json")
    assert code == 3
    assert stderr.startswith("rankmesh: no gateway answers at")
    assert stderr.count("\n") == 1


def on_a_terminal(
    arguments: list[str], until: bytes = b"", then: Callable[[], None] = lambda: None
) -> tuple[int, bytes]:
    """Run a command on a terminal; when it has shown something, call a function, and then press Ctrl-C.

    What it shows is read meanwhile, too: a terminal that is full stops the command.
    """

    def press() -> None:
        try:
            then()
        finally:
            command.send_signal(signal.SIGINT)

    ours, theirs = pty.openpty()
    with (
        ThreadPoolExecutor(1) as other,
        subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(TERM="xterm-256color", COLUMNS="200", LINES="50"),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        ) as command,
    ):
        os.close(theirs)
        seen, end = b"", time.monotonic() + 60
        pressed: Future[None] | None = None
        try:
            while time.monotonic() < end:
                if select.select([ours], [], [], 0.1)[0]:
                    try:
                        piece = os.read(ours, 1 << 16)
                    except OSError:  # the command has ended, and its end of the terminal with it
                        break
                    if not piece:
                        break
                    seen += piece
                if until and until in seen and pressed is None:
                    pressed = other.submit(press)
            code = command.wait(60)
            if pressed is not None:
                pressed.result()
            return code, seen
        finally:
            command.kill()
            os.close(ours)


def test_live_on_a_terminal(double: Double, overview: Overview):
    """It goes on while the gateway does not answer."""
    double.answers[PATH] = overview()

    def then() -> None:
        for double.gone in (False, True):
            count = len(double.asked) + 3
            wait_until(lambda: len(double.asked) >= count, "three requests", 25)  # noqa: B023

    code, screen = on_a_terminal(["status", "--gateway", double.url, "--interval", "0.1"], b"all_reduce", then)
    assert code == 0, screen
    assert b"Traceback" not in screen
    assert b"NO ANSWER since" in screen


def test_groups(gateway: Gateway, overview: Overview):
    code, stdout, _ = gateway("groups")
    assert code == 0
    assert words(stdout)[1:] == [
        ["group", "ranks", "medium", "calls", "calls/s", "bytes/s"],
        ["world", "0-1", "shm", "41-42", "12.3", "2.5", "MB/s"],
    ]
    assert gateway("groups", "--json").document == overview()["groups"]


@pytest.mark.parametrize("name", ["world", "776f726c64000000"])
def test_one_group(gateway: Gateway, overview: Overview, name: str):
    code, stdout, _ = gateway("groups", name)
    assert code == 0
    assert ["1", "host-1", "alive", "41"] in words(stdout)
    assert any("missing" in line for line in words(stdout))
    group = {**overview()["groups"][0], "inflight": overview()["inflight"]}
    assert gateway("groups", name, "--json").document == group
    assert gateway("groups", "pair") == (1, "", "rankmesh: there is no group 'pair'; there are: world\n")
    failed = gateway("groups", name, groups=[{**overview()["groups"][0], "failure": "rank 1 failed"}])
    assert failed.code == 1


def test_a_name_that_several_groups_have(gateway: Gateway, overview: Overview):
    groups = overview()["groups"]
    groups.append({**groups[0], "id": "00000000000000bb", "job": "train-2"})
    code, stdout, stderr = gateway("groups", "world", groups=groups)
    assert (code, stdout) == (2, "")
    assert "00000000000000bb (train-2, epoch 1)" in stderr
    assert gateway("groups", "world", "--job", "train-2", groups=groups).code == 0


def test_a_real_job(job: Job):
    done = until_it_fits(lambda: job.here("status", "--json"), lambda done: done.code == 0)
    assert done.stderr == ""
    assert [each["member"]["rank"] for each in done.document["ranks"]] == [0, 1, 2]
    assert {each["name"] for each in done.document["groups"]} >= {"world"}
    done = until_it_fits(lambda: job.here("groups", "world"), lambda done: done.stdout.count("alive") == 3)
    assert done.code == 0
    code, stdout, stderr = here("status", "--gateway", job.url, RANKMESH_TOKEN="another")
    assert (code, stdout) == (4, "")
    assert stderr.count("\n") == 1
