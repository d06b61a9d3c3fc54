"""What is in the file, and who hosts the gateway it names. Locks are between processes, so some of these start one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import free_port, wait_until

from rankmesh._rendezvous.file import FileLocator
from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import DistNetworkError

OTHER_PROCESS = """\
import sys
from pathlib import Path
from rankmesh._rendezvous.file import FileLocator
from rankmesh_agent.config.settings import Settings
locator = FileLocator(Path(sys.argv[1]), Settings(job=sys.argv[2]))
while (url := locator.find()) is None:  # a host that is late to answer is not known
    pass
print(url, flush=True)
if sys.stdin.readline():
    locator.close()
"""


class Other:
    """Another process that has called ``find`` and waits to be told to close; without a word it just dies."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = process.stdout.readline().strip()

    def close(self) -> None:
        self.process.stdin.write("close\n")
        self.process.stdin.close()
        assert self.process.wait(20) == 0

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def another_process(path: Path, job: str = "job") -> Iterator[Other]:
    command = [sys.executable, "-c", OTHER_PROCESS, str(path), job]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meet"


def gateways(path: Path) -> dict[str, dict[str, str]]:
    return json.loads(path.read_text())["gateways"]


def test_who_finds_no_gateway_hosts_it_and_removes_the_file_at_the_end(opened, settings, path, answers):
    locator = opened(FileLocator, path, settings)
    url = locator.find()
    assert answers(url)
    assert gateways(path) == {"job": {"url": url, "id": locator._hosted.address.id}}
    assert locator.find() == url
    locator.close()
    assert not answers(url)
    assert not path.exists()
    locator.close()


def test_another_process_finds_it(opened, settings, path):
    locator = opened(FileLocator, path, settings)
    url = locator.find()
    with another_process(path) as other:
        assert other.url == url
        other.close()
    assert gateways(path)["job"]["url"] == url


def test_one_whose_host_died_is_followed_by_another(opened, settings, path, answers):
    with another_process(path) as host:
        locator = opened(FileLocator, path, settings)
        assert wait_until(locator.find, "the host's answer") == host.url
        assert locator._hosted is None
        host.die()
        wait_until(lambda: locator.find() not in (None, host.url), "another gateway")
    assert answers(locator.find())


def test_while_another_process_decides_nothing_is_known(opened, settings, path):
    """It holds the job's lock, or writes; what the file says may be from before."""
    locator = opened(FileLocator, path, settings)
    path.write_text(json.dumps({"gateways": {"job": {"url": f"http://127.0.0.1:{free_port()}", "id": "old"}}}))
    for byte in (locator._job_byte, 1 << 40):
        script = (
            f"import fcntl; f = open({str(path)!r}, 'r+'); fcntl.lockf(f, fcntl.LOCK_EX, 1, {byte}); "
            "print(flush=True); input()"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            holder.stdout.readline()
            assert locator.find() is None
            assert locator._hosted is None
            holder.kill()
    assert locator.find() is not None


class TestSeveralJobs:
    def test_each_has_its_own_gateway_in_the_file(self, opened, settings, path, answers):
        ours = opened(FileLocator, path, settings)
        url = ours.find()
        with another_process(path, "other") as other:
            assert answers(other.url)
            assert {job: reported["url"] for job, reported in gateways(path).items()} == {
                "job": url,
                "other": other.url,
            }
            ours.close()
            assert set(gateways(path)) == {"other"}
            other.close()
        assert not path.exists()

    def test_the_last_to_leave_removes_jobs_that_died(self, opened, settings, path):
        with another_process(path, "died") as other:
            assert other.url
            other.die()
        ours = opened(FileLocator, path, settings)
        ours.find()
        assert set(gateways(path)) == {"died", "job"}
        ours.close()
        assert not path.exists()

    def test_an_old_entry_whose_port_is_another_jobs_gateway_now_is_not_believed(self, opened, settings, path):
        foreign = HostedGateway("127.0.0.1", 0, Settings(job="foreign"))
        try:
            path.write_text(json.dumps({"gateways": {"job": {"url": foreign.address.url, "id": "before"}}}))
            assert opened(FileLocator, path, settings).find() != foreign.address.url
        finally:
            foreign.close()


@pytest.mark.parametrize("content", ["", "{", '{"gateways": 1}', '{"gateways": {"job": "http://"}}'])
def test_a_spoiled_file_of_an_earlier_job_does_not_matter(opened, settings, path, content):
    path.write_text(content)
    url = opened(FileLocator, path, settings).find()
    assert gateways(path)["job"]["url"] == url


def test_a_file_that_was_removed_is_made_anew_by_who_still_has_it_open(opened, settings, path, monkeypatch):
    """The last job may remove the file between another's opening and locking it: that one must not host there."""
    locator = opened(FileLocator, path, settings)
    opening = os.open

    def removed_in_between(*arguments: object) -> int:
        descriptor = opening(*arguments)
        if arguments[1] & os.O_CREAT:
            path.unlink()
            monkeypatch.setattr(os, "open", opening)
        return descriptor

    monkeypatch.setattr(os, "open", removed_in_between)
    assert locator.find() is None
    assert not path.exists()
    assert locator.find() is not None
    assert path.exists()


class TestErrors:
    def test_no_directory(self, opened, settings, tmp_path):
        with pytest.raises(ValueError, match="directory must exist"):
            opened(FileLocator, tmp_path / "none" / "meet", settings).find()

    def test_a_file_system_without_locks(self, opened, settings, path, monkeypatch):
        def refuse(*arguments: object) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(fcntl, "lockf", refuse)
        with pytest.raises(DistNetworkError, match="No locks available; use tcp"):
            opened(FileLocator, path, settings).find()

    def test_a_full_disk_leaves_no_gateway(self, opened, settings, path, monkeypatch):
        def full(*arguments: object) -> int:
            raise OSError(28, "No space left on device")

        descriptors = len(os.listdir("/proc/self/fd"))
        locator = opened(FileLocator, path, settings)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            with pytest.raises(DistNetworkError, match="No space left"):
                locator.find()
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert locator.find() is not None
