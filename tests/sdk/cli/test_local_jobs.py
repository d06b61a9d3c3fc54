"""The jobs that a user runs on this host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import here as run

from rankmesh._cli import options
from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import CommandError
from rankmesh._cli.options import LocalJob, local_jobs

ONE = {"RANKMESH_GATEWAY": "http://127.0.0.1:1", "RANKMESH_TOKEN": "t1", "RANKMESH_JOB": "one-1", "RANK": "0"}
TWO = {"RANKMESH_GATEWAY": "http://127.0.0.1:2", "RANKMESH_TOKEN": "t2", "RANKMESH_JOB": "two-2", "RANK": "3"}


@pytest.fixture
def proc(tmp_path: Path):
    """Makes what the kernel shows of processes with these environments."""

    def make(*environments: dict[str, str]) -> Path:
        for pid, variables in enumerate(environments, 100):
            folder = tmp_path / str(pid)
            folder.mkdir()
            (folder / "environ").write_bytes(
                b"".join(f"{name}={value}\0".encode() for name, value in variables.items())
            )
        (tmp_path / "self").mkdir()
        (tmp_path / "99999").mkdir()  # ended between two looks
        return tmp_path

    return make


def test_ranks_that_a_launcher_started(proc):
    folder = proc(TWO, ONE, {**ONE, "RANK": "1"}, {"PATH": "/bin"}, {})
    assert local_jobs(folder) == [
        LocalJob("http://127.0.0.1:1", "t1", "one-1"),
        LocalJob("http://127.0.0.1:2", "t2", "two-2"),
    ]


@pytest.mark.parametrize("without", ["RANKMESH_GATEWAY", "RANKMESH_JOB", "RANK"])
def test_a_shell_with_some_of_its_variables_is_no_rank(proc, without: str):
    assert local_jobs(proc({name: value for name, value in ONE.items() if name != without})) == []


def test_what_makes_no_sense_is_left_out(proc):
    assert local_jobs(proc({**ONE, "RANKMESH_TIMEOUT": "soon"})) == []


HERE = [LocalJob("http://127.0.0.1:1", "t1", "one"), LocalJob("http://127.0.0.1:2", "t2", "two")]
CHOICES: dict[str, tuple[str, dict[str, str], int, tuple[str, str]]] = {
    # the address given, variables, how many jobs are here; the gateway, the token
    "the only job here": ("", {}, 1, ("http://127.0.0.1:1", "t1")),
    "one of two": ("127.0.0.1:2", {}, 2, ("http://127.0.0.1:2", "t2")),
    "another": ("127.0.0.1:3", {}, 2, ("http://127.0.0.1:3", "")),
    "a token in the environment": ("", {"RANKMESH_TOKEN": "mine"}, 1, ("http://127.0.0.1:1", "mine")),
    "a master": ("", {"MASTER_ADDR": "::1", "MASTER_PORT": "2"}, 1, ("http://[::1]:2", "")),
    "a gateway": ("", {"MASTER_PORT": "2", "RANKMESH_GATEWAY": "http://10.0.0.1:3/"}, 1, ("http://10.0.0.1:3", "")),
    "nothing": ("", {}, 0, (options.DEFAULT_GATEWAY, "")),
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch):
    """Has so many jobs run here, and no variable set."""
    for name in (*ONE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return lambda count: monkeypatch.setattr(options, "local_jobs", lambda: HERE[:count])


@pytest.mark.parametrize(("given", "variables", "count", "chosen"), CHOICES.values(), ids=CHOICES)
def test_the_choice_of_a_gateway(here, monkeypatch, given, variables, count, chosen):
    here(count)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = options.gateway(given, None)
    assert (found.url, found.token) == chosen


def test_one_of_several_has_to_be_chosen(here):
    here(2)
    with pytest.raises(CommandError, match="several jobs of yours run here: give --job or --gateway") as caught:
        options.gateway("", None)
    assert caught.value.code == 2
    assert "two (http://127.0.0.1:2)" in str(caught.value)


@pytest.mark.parametrize("command", ["status", "stacks", "diagnose", "doctor", "store", "get"])
def test_a_job_selects_its_gateway(here, monkeypatch, command: str):
    """Each command that has --job passes it on; an unknown one is an error that lists the jobs."""
    here(2)
    asked: list[str] = []
    monkeypatch.setattr(ServiceClient, "request", lambda self, *_: asked.append(self.url) or refuse())
    words = {"store": ["store", "keys"], "get": ["get", "/v1/jobs"]}.get(command, [command])
    assert run(*words, "--job", "two").code == 5
    assert asked == ["http://127.0.0.1:2"]
    code, stdout, stderr = run(*words, "--job", "three")
    assert (code, stdout) == (1, "")
    assert stderr == (
        "rankmesh: no job 'three' of yours runs here; there are: one (http://127.0.0.1:1), two (http://127.0.0.1:2)\n"
    )


def refuse() -> None:
    raise CommandError("not asked")
