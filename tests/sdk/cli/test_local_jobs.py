"""The jobs that a user runs on this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankmesh._cli import options
from rankmesh._cli.exit_codes import CommandError
from rankmesh._cli.local_jobs import LocalJob, local_jobs

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


class TestWhichGateway:
    @pytest.fixture(autouse=True)
    def nothing_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (*ONE, "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)

    def there(self, monkeypatch: pytest.MonkeyPatch, *found: LocalJob) -> None:
        monkeypatch.setattr(options, "local_jobs", lambda: list(found))

    def test_the_only_job_here(self, monkeypatch):
        self.there(monkeypatch, LocalJob("http://127.0.0.1:1", "t1", "one"))
        found = options.gateway("", None)
        assert (found.url, found.token) == ("http://127.0.0.1:1", "t1")

    def test_the_token_of_the_one_that_is_asked_for(self, monkeypatch):
        self.there(
            monkeypatch, LocalJob("http://127.0.0.1:1", "t1", "one"), LocalJob("http://127.0.0.1:2", "t2", "two")
        )
        assert options.gateway("127.0.0.1:2", None).token == "t2"
        assert options.gateway("127.0.0.1:3", None).token == ""

    def test_one_of_several_has_to_be_chosen(self, monkeypatch):
        self.there(
            monkeypatch, LocalJob("http://127.0.0.1:1", "t1", "one"), LocalJob("http://127.0.0.1:2", "t2", "two")
        )
        with pytest.raises(CommandError, match="several jobs of yours run here: give --gateway") as caught:
            options.gateway("", None)
        assert caught.value.code == 2
        assert "http://127.0.0.1:2 (two)" in str(caught.value)

    def test_the_environment_goes_first(self, monkeypatch):
        self.there(monkeypatch, LocalJob("http://127.0.0.1:1", "t1", "one"))
        monkeypatch.setenv("MASTER_ADDR", "::1")
        monkeypatch.setenv("MASTER_PORT", "2")
        monkeypatch.setenv("RANKMESH_TOKEN", "mine")
        found = options.gateway("", None)
        assert (found.url, found.token) == ("http://[::1]:2", "mine")
        monkeypatch.setenv("RANKMESH_GATEWAY", "http://10.0.0.1:3/")
        assert options.gateway("", None).url == "http://10.0.0.1:3"

    def test_nothing_is_said_and_nothing_runs(self, monkeypatch):
        self.there(monkeypatch)
        assert options.gateway("", None).url == options.DEFAULT_GATEWAY
