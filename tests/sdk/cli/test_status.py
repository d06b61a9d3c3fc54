"""``rankmesh status`` of a gateway's double and of a real job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support import overview as made_up
from support.command import Done, Double, Job, here, until_it_fits
from support.processes import free_port
from support.terminal import Terminal

pytestmark = pytest.mark.processes

Overview = Callable[..., dict[str, Any]]
Gateway = Callable[..., Done]
PATH = "/v1/overview"

PLAIN = """\
gateway {url}, RankMesh 0.1.0, up 61.0 s; 12.3 operations/s, 2.5 MB/s
  all is well

Ranks of train-1, epoch 1
  rank  host     pid  state  last heartbeat  agent
     0  host-0  4000  alive      400 ms ago  http://127.0.0.1:8000
     1  host-1  4001  alive      400 ms ago  http://127.0.0.1:8001

Agents
  name     host           pid  state  last heartbeat  url                    leased to
  agent-7  agent-7.local    1  free       200 ms ago  http://127.0.0.1:8701

Groups
  group  ranks  medium  operations  operations/s   bytes/s
  world  0-1    shm          41-42          12.3  2.5 MB/s

In flight
  group  call  operation                         age   bytes  arrived  missing
  world  #103  all_reduce(sum, float32 x 1024)  2.5 s  4.1 kB  0        1
"""


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def gateway(double: Double, overview: Overview) -> Callable[..., Done]:
    """Serves an overview with some changes, and runs a command about it in this process."""

    def run(*arguments: str, problems: Sequence[dict[str, Any]] = (), **changes: Any) -> Done:
        double.answers |= {PATH: overview(**changes), "/v1/diagnosis": {"problems": problems}}
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
    ours = {"ok": True, "complaints": [], "remarks": [], "findings": [], "problems": [], "url": double.url}
    assert done.document == {**ours, **overview()}


YOUNG = made_up.finding("rank 2 has not come to all_reduce #3 for 5.8 s", job="train-1", young=True)
OTHER = made_up.finding("group world of job other has failed", job="other", kind="group", severity="failed")
NOTE = made_up.finding("the others wait for rank 1", kind="busy", severity="note")


def test_problems(gateway: Gateway, overview: Overview):
    """They are the gateway's, in its order; a job is named where there are several."""
    ranks = [*overview()["ranks"], made_up.rank(0, job="other")]
    young = f"job train-1: {YOUNG['text']}; the wait is young, and may be a slow step"
    code, stdout, _ = gateway("status", ranks=ranks, problems=[YOUNG, OTHER, NOTE])
    assert (code, "all is well" in stdout) == (1, False)
    assert f"  {young}\n  {OTHER['text']}\n  {NOTE['text']}\n" in stdout
    done = gateway("status", "--json", ranks=ranks, problems=[YOUNG, OTHER, NOTE]).document
    assert (done["ok"], done["complaints"], done["remarks"]) == (False, [young, OTHER["text"]], [NOTE["text"]])
    assert (done["findings"], done["problems"]) == ([YOUNG], [YOUNG, OTHER])
    done = gateway("status", problems=[NOTE])
    assert (done.code, NOTE["text"] in done.stdout) == (0, True)


def test_a_slow_rank(gateway: Gateway, overview: Overview):
    ranks = overview()["ranks"]
    ranks[0]["slow"], ranks[1]["slow"] = 0.234, 0.01
    found = words(gateway("status", ranks=ranks).stdout)
    assert ["rank", "host", "pid", "state", "last", "heartbeat", "slow", "agent"] in found
    assert ["0", "host-0", "4000", "alive", "400", "ms", "ago", "23%", "http://127.0.0.1:8000"] in found
    assert ["1", "host-1", "4001", "alive", "400", "ms", "ago", "http://127.0.0.1:8001"] in found


@pytest.mark.parametrize("command", ["status", "stacks", "diagnose", "doctor"])
def test_an_unknown_job(double: Double, overview: Overview, command: str):
    ranks = [*overview()["ranks"], made_up.rank(0, job="other")]
    health = {"status": "ok", "version": "0.1.0"}
    double.answers = {PATH: overview(ranks=ranks), "/health": health}
    double.answers |= {"/v1/ranks/snapshots?job=another&patience=1.0": [], "/v1/jobs": ranks}
    code, stdout, stderr = here(command, "--job", "another", "--gateway", double.url, "--json")
    assert (code, stdout) == (1, "")
    assert stderr == f"rankmesh: the gateway at {double.url} has no job 'another'; there are: other, train-1\n"


def test_the_age_of_call_counts(gateway: Gateway, overview: Overview):
    groups = overview()["groups"]
    groups[0]["ages"] = {"0": 0.2, "1": 0.8}
    _, stdout, _ = gateway("status", groups=groups)
    assert ["world", "0-1", "shm", "41-42", "800", "ms", "ago", "12.3", "2.5", "MB/s"] in words(stdout)
    _, stdout, _ = gateway("status", "world", groups=groups)
    assert ["0", "host-0", "alive", "42", "200", "ms", "ago"] in words(stdout)


def test_nothing_is_there(gateway: Gateway):
    code, stdout, _ = gateway("status", ranks=[], agents=[], groups=[], inflight=[])
    assert code == 0
    assert "none; 'rankmesh run' starts some" in stdout


def test_names_cannot_drive_the_terminal(double: Double, gateway: Gateway, overview: Overview):
    ranks = overview()["ranks"]
    ranks[0]["member"]["host"] = "\x1b]0;title\x07\x9b2J[bold]evil[/bold]\n"
    assert "\ufffd]0;title\ufffd\ufffd2J[bold]evil[/bold]\ufffd" in gateway("status", ranks=ranks).stdout
    for once in ("--once", "--interval=60"):
        with Terminal("status", "--gateway", double.url, once) as terminal:
            terminal.until("host-1")
            terminal.press("q")
            assert terminal.end() == 0
        assert b"]0;title" in terminal.seen
        assert b"\x1b]0" not in terminal.seen
        assert b"[bold]evil" in terminal.seen


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


@pytest.mark.parametrize("command", ["status", "diagnose", "doctor"])
def test_no_gateway_answers(command: str):
    code, _, stderr = here(command, "--gateway", f"127.0.0.1:{free_port()}", "--json")
    assert code == 3
    assert stderr.startswith("rankmesh: no gateway answers at")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["status", "--groups"], ["groups"]], ids=" ".join)
def test_groups(gateway: Gateway, overview: Overview, command: list[str]):
    """The second is its name up to version 0.2."""
    code, stdout, _ = gateway(*command)
    assert code == 0
    assert words(stdout)[1:] == [
        ["group", "ranks", "medium", "operations", "operations/s", "bytes/s"],
        ["world", "0-1", "shm", "41-42", "12.3", "2.5", "MB/s"],
    ]
    assert gateway(*command, "--json").document == overview()["groups"]


@pytest.mark.parametrize("name", ["world", "776f726c64000000"])
def test_one_group(gateway: Gateway, overview: Overview, name: str):
    code, stdout, _ = gateway("status", name)
    assert code == 0
    assert ["1", "host-1", "alive", "41"] in words(stdout)
    assert any("missing" in line for line in words(stdout))
    group = {**overview()["groups"][0], "inflight": overview()["inflight"]}
    assert gateway("status", name, "--json").document == group
    assert gateway("status", "pair") == (1, "", "rankmesh: there is no group 'pair'; there are: world\n")
    failed = gateway("status", name, groups=[{**overview()["groups"][0], "failure": "rank 1 failed"}])
    assert failed.code == 1


def test_a_name_that_several_groups_have(gateway: Gateway, overview: Overview):
    groups = overview()["groups"]
    groups.append({**groups[0], "id": "00000000000000bb", "job": "train-2"})
    code, stdout, stderr = gateway("status", "world", groups=groups)
    assert (code, stdout) == (2, "")
    assert "00000000000000bb (train-2, epoch 1)" in stderr
    assert gateway("status", "world", "--job", "train-2", groups=groups).code == 0


def test_a_real_job(job: Job):
    done = until_it_fits(lambda: job.here("status", "--json"), lambda done: done.code == 0)
    assert done.stderr == ""
    assert [each["member"]["rank"] for each in done.document["ranks"]] == [0, 1, 2]
    assert {each["name"] for each in done.document["groups"]} >= {"world"}
    done = until_it_fits(lambda: job.here("status", "world"), lambda done: done.stdout.count("alive") == 3)
    assert done.code == 0
    code, stdout, stderr = here("status", "--gateway", job.url, RANKMESH_TOKEN="another")
    assert (code, stdout) == (4, "")
    assert stderr.count("\n") == 1
