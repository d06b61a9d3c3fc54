"""``rankmesh store``: the store of a real job. Where how a process ends is at stake, commands are real processes."""

from __future__ import annotations

import base64
import subprocess
import threading

import pytest
from support.command import COMMAND, Double, Job, environment, here
from support.processes import free_port, plain_http_server

pytestmark = pytest.mark.processes

EVERY_BYTE = bytes(range(256)) * 1000


def test_bytes_in_and_out(job: Job):
    assert job.here("store", "set", "cli/bytes", "-", stdin=EVERY_BYTE) == (0, "", "")
    got = job.here("store", "get", "cli/bytes")
    assert (got.code, got.stderr) == (0, "")
    assert got.stdout.encode(errors="surrogateescape") == EVERY_BYTE


@pytest.mark.parametrize("value", ["", "text", "zwölf\n", "-x"])
def test_a_value_as_an_argument(job: Job, value: str):
    assert job.here("store", "set", "cli/text", "--", value) == (0, "", "")
    assert job.here("store", "get", "cli/text") == (0, value, "")


def test_a_key_that_nobody_has_set(job: Job):
    code, stdout, stderr = job.here("store", "get", "cli/none")
    assert (code, stdout) == (1, "")
    assert stderr == "rankmesh: key 'cli/none' is not set; --timeout waits\n"


def test_a_key_that_nobody_sets_in_time(job: Job):
    code, stdout, stderr = job.here("store", "get", "cli/none", "--timeout", "0.2")
    assert (code, stdout, stderr) == (124, "", "rankmesh: key 'cli/none' is not set after 0.2 s\n")
    code, stdout, stderr = job.here("store", "wait", "cli/none", "cli/neither", "--timeout", "0.2")
    assert (code, stdout, stderr.count("\n")) == (124, "", 1)
    assert "cli/none" in stderr
    assert "cli/neither" in stderr


def test_waiting_until_others_set_keys(job: Job):
    ends = {}

    def wait() -> None:
        ends["wait"] = job("store", "wait", "cli/later", "cli/latest", "--timeout", "30")

    def get() -> None:
        ends["get"] = job("store", "get", "cli/latest", "--timeout", "30")

    threads = [threading.Thread(target=each) for each in (wait, get)]
    for thread in threads:
        thread.start()
    for key in ("cli/later", "cli/latest"):
        assert job.here("store", "set", key, "now").code == 0
    for thread in threads:
        thread.join()
    assert ends == {"wait": (0, "", ""), "get": (0, "now", "")}


def test_numbers(job: Job):
    job.here("store", "delete", "cli/n")
    assert job.here("store", "add", "cli/n") == (0, "1\n", "")
    assert job.here("store", "add", "cli/n", "-5") == (0, "-4\n", "")
    assert job.here("store", "set", "cli/n", "-5") == (0, "", "")
    assert job.here("store", "get", "cli/n").stdout == "-5"
    assert job.here("store", "set", "cli/n", "-4") == (0, "", "")
    assert job.here("store", "add", "cli/n", "14", "--json").document == {"key": "cli/n", "value": 10}
    job.here("store", "set", "cli/text", "text")
    code, stdout, stderr = job.here("store", "add", "cli/text")
    assert (code, stdout, stderr.count("\n")) == (5, "", 1)
    assert "not a number" in stderr


def test_keys_and_their_end(job: Job):
    for key in ("cli/list/b", "cli/list/a", "cli/list/with\nbreak"):
        assert job.here("store", "set", key, "1").code == 0
    assert job.here("store", "keys", "cli/list/") == (0, "cli/list/a\ncli/list/b\ncli/list/with\\nbreak\n", "")
    listed = job.here("store", "keys", "cli/list/", "--json")
    assert listed.document == ["cli/list/a", "cli/list/b", "cli/list/with\nbreak"]
    assert job.here("store", "keys", "cli/nothing/") == (0, "", "")
    assert job.here("store", "delete", "cli/list/a") == (0, "", "")
    assert job.here("store", "delete", "cli/list/a") == (1, "", "rankmesh: key 'cli/list/a' is not set\n")
    again = job.here("store", "delete", "cli/list/a", "--json")
    assert (again.code, again.document) == (1, {"key": "cli/list/a", "deleted": False})


@pytest.mark.parametrize("value", [b"text", b"\xff\x00"])
def test_documents(job: Job, value: bytes):
    text = "text" if value == b"text" else None
    done = job.here("store", "set", "cli/d", "-", "--json", stdin=value)
    assert done.document == {"key": "cli/d", "bytes": len(value)}
    expected = {"key": "cli/d", "bytes": len(value), "text": text, "base64": base64.b64encode(value).decode()}
    assert job.here("store", "get", "cli/d", "--json").document == expected
    assert job.here("store", "wait", "cli/d", "--json").document == {"keys": ["cli/d"]}


def test_any_agent_will_do(job: Job):
    job.here("store", "set", "cli/any", "seen")
    for rank in job.alive():
        agent = rank["member"]["http"]
        assert job.here("store", "get", "cli/any", "--agent", agent, RANKMESH_GATEWAY="") == (0, "seen", "")


def test_the_token(job: Job, tmp_path):
    get = ("store", "get", "cli/token", "--gateway", job.url)
    job.here("store", "set", "cli/token", "seen")
    token = tmp_path / "token"
    token.write_text(f"{job.token}\n")
    assert here(*get, "--token-file", str(token)) == (0, "seen", "")
    code, stdout, stderr = here(*get, RANKMESH_TOKEN="another")
    assert (code, stdout, stderr.count("\n")) == (4, "", 1)
    assert "has another token than the one given; set RANKMESH_TOKEN to the job's" in stderr
    agent = job.alive()[1]["member"]["http"]
    code, stdout, stderr = here("store", "get", "k", "--agent", agent, RANKMESH_TOKEN="another")
    assert (code, stdout, stderr.count("\n")) == (4, "", 1)
    token.write_text("")
    code, stdout, stderr = here(*get, "--token-file", str(token))
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert here(*get, "--token-file", str(tmp_path / "none")).code == 2


def test_on_the_jobs_host_the_token_need_not_be_given(job: Job):
    """The ranks are this user's: the kernel shows their environment."""
    job.here("store", "set", "cli/local_jobs", "seen")
    assert here("store", "get", "cli/local_jobs", "--gateway", job.url) == (0, "seen", "")


def test_nobody_there(job: Job):
    place = f"127.0.0.1:{free_port()}"
    code, stdout, stderr = job.here("store", "get", "k", "--gateway", place)
    assert (code, stdout, stderr.count("\n")) == (3, "", 1)
    assert f"no gateway answers at http://{place}" in stderr
    code, stdout, stderr = job.here("store", "get", "k", "--agent", place)
    assert (code, stdout, stderr.count("\n")) == (3, "", 1)
    with plain_http_server() as port:
        code, stdout, stderr = job.here("store", "get", "k", "--gateway", f"127.0.0.1:{port}")
        assert (code, stdout) == (5, "")
        assert "is not a RankMesh gateway" in stderr


def test_an_agent_that_only_its_peers_reach_by_its_first_address(double: Double):
    inside = f"http://127.0.0.1:{free_port()}"
    rank = {"job": "j", "epoch": 1, "state": "alive", "member": {"rank": 0, "http": inside}}
    agent = {"agent": {"urls": [inside, double.url]}}
    double.answers = {"/v1/ranks": [rank], "/v1/agents": [agent], "/livez": {"ok": True}, "/v1/store/k?wait=0.0": "v"}
    assert here("store", "get", "k", "--gateway", double.url) == (0, '"v"', "")


def test_which_job(job: Job):
    name = job.alive()[0]["job"]
    assert job.here("store", "keys", "--job", name).code == 0
    assert job.here("store", "keys", RANKMESH_JOB=name).code == 0
    code, stdout, stderr = job.here("store", "keys", "--job", "another")
    assert (code, stdout) == (1, "")
    assert stderr == f"rankmesh: the gateway at {job.url} has no running job 'another'; there are: {name}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", ""],
        ["get", "k" * 8193],
        ["get"],
        ["get", "k", "--timeout", "-1"],
        ["get", "k", "--gateway", "no address"],
        ["get", "k", "--gateway", "http://127.0.0.1"],
        ["get", "k", "--agent", "ftp://127.0.0.1:1"],
        ["add", "k", "many"],
        ["wait"],
    ],
    ids=str,
)
def test_what_makes_no_sense(job: Job, arguments: list[str]):
    code, stdout, stderr = job.here("store", *arguments)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr


def test_a_setting_that_makes_no_sense(job: Job):
    code, stdout, stderr = job.here("store", "keys", RANKMESH_TIMEOUT="soon")
    assert (code, stdout, stderr) == (2, "", "rankmesh: RANKMESH_TIMEOUT='soon' is not a number of seconds\n")


def test_a_reader_that_goes(job: Job):
    job.here("store", "set", "cli/large", "-", stdin=b"x" * (1 << 20))  # a pipe holds less
    variables = environment(RANKMESH_GATEWAY=job.url, RANKMESH_TOKEN=job.token)
    with subprocess.Popen(
        [*COMMAND, "store", "get", "cli/large"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.read(3) == b"xxx"
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait(60) == 141
    job.here("store", "delete", "cli/large")
