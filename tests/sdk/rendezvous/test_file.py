"""What is in the file, and who hosts the gateway it names."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import wait_until

from rankmesh._rendezvous.file import FileLocator
from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh._stores.key_file import KeyFile
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import DistNetworkError, DistStoreError

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


def gateways(path: Path) -> dict[str, GatewayAddress | None]:
    with contextlib.closing(KeyFile(str(path))) as file:
        keys = file.keys("rankmesh/gateway/")
        return {key.rpartition("/")[2]: GatewayAddress.from_json(file.value(key)) for key in keys}


def write(path: Path, value: bytes | GatewayAddress, job: str = "job") -> None:
    """Write what an earlier job may have left."""
    content = value.to_json().encode() if isinstance(value, GatewayAddress) else value
    with contextlib.closing(KeyFile(str(path))) as file:
        file.change(lambda _: (None, {f"rankmesh/gateway/{job}": content}))


def test_one_whose_host_died_is_followed_by_another(opened, settings, path, answers):
    with another_process(path) as host:
        locator = opened(FileLocator, path, settings)
        assert wait_until(locator.find, "the host's answer") == host.url
        assert locator._hosted is None
        host.die()
        wait_until(lambda: locator.find() not in (None, host.url), "another gateway")
    assert answers(locator.find())


def test_one_that_does_not_answer_yet_is_waited_for(opened, settings, path, monkeypatch):
    monkeypatch.setattr("rankmesh._rendezvous.hosted._HEALTH_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write(path, GatewayAddress(f"http://127.0.0.1:{silent.getsockname()[1]}", "starting"))
        locator = opened(FileLocator, path, settings)
        assert locator.find() is None
        assert locator._hosted is None
    assert locator.find() is not None


class TestSeveralJobs:
    def test_the_last_to_leave_removes_jobs_that_died(self, opened, settings, path):
        with another_process(path, "died") as other:
            assert other.url
            other.die()
            wait_until(lambda: gateways(path)["died"].is_there() is False, "the end of its gateway")
        ours = opened(FileLocator, path, settings)
        ours.find()
        assert set(gateways(path)) == {"died", "job"}
        ours.close()
        assert not path.exists()

    def test_an_old_entry_whose_port_is_another_jobs_gateway_now_is_not_believed(self, opened, settings, path):
        foreign = HostedGateway("127.0.0.1", 0, Settings(job="foreign"))
        try:
            write(path, foreign.address._replace(id="before"))
            assert opened(FileLocator, path, settings).find() != foreign.address.url
        finally:
            foreign.close()


@pytest.mark.parametrize("content", [b"", b"{", b'{"url": 1}', b"\xff"])
def test_a_spoiled_entry_of_an_earlier_job_does_not_matter(opened, settings, path, content):
    write(path, content)
    url = opened(FileLocator, path, settings).find()
    assert gateways(path)["job"].url == url


class TestErrors:
    def test_no_directory(self, opened, settings, tmp_path):
        with pytest.raises(ValueError, match="directory must exist"):
            opened(FileLocator, tmp_path / "none" / "meet", settings).find()

    def test_a_file_that_cannot_be_written_leaves_no_gateway(self, opened, settings, path, monkeypatch):
        def full(*arguments: object) -> None:
            raise DistStoreError("database or disk is full")

        descriptors = len(os.listdir("/proc/self/fd"))
        locator = opened(FileLocator, path, settings)
        change = KeyFile.change
        with monkeypatch.context() as patched:
            patched.setattr(KeyFile, "change", lambda self, plan: change(self, lambda values: full(plan(values))))
            with pytest.raises(DistNetworkError, match="disk is full; tcp://host:port needs no file"):
                locator.find()
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert locator.find() is not None
