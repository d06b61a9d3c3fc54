"""Rendezvous files, token files, and the other files of a job."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.users import OTHER_USER, as_other_user, as_root

from rankmesh._rendezvous.file import FileLocator
from rankmesh._stores.key_file import KeyFile
from rankmesh_agent.config.settings import Settings, create_token, read_token
from rankmesh_agent.remote import address
from rankmesh_agent.shared_memory import mapping as shared_memory

ENTRY = b'{"url": "http://127.0.0.1:9", "id": "planted"}'


def plant(path: Path) -> None:
    """Write the address of a gateway, as a job does."""
    with contextlib.closing(KeyFile(str(path))) as file:
        file.change(lambda _: (None, {"rankmesh/gateway/job": ENTRY}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meet"


@pytest.fixture
def locator(path: Path) -> Iterator[FileLocator]:
    locator = FileLocator(path, Settings(job="job"))
    yield locator
    locator.close()


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("content", ["precious", "[]", "\n"])
def test_a_rendezvous_does_not_overwrite_a_file_with_other_content(locator: FileLocator, path: Path, content: str):
    path.write_text(content)
    with pytest.raises(ValueError, match=r"is refused, and was not changed: it has other content .*; remove it, or "):
        locator.find()
    assert path.read_text() == content


def test_a_rendezvous_does_not_follow_a_symbolic_link(locator: FileLocator, path: Path, tmp_path: Path):
    for target in (tmp_path / "none", tmp_path / "empty"):
        path.symlink_to(target)
        with pytest.raises(ValueError, match="it is a symbolic link"):
            locator.find()
        assert not target.exists() or not target.read_bytes()
        path.unlink()
        (tmp_path / "empty").touch()


def test_a_rendezvous_does_not_wait_for_a_fifo(locator: FileLocator, path: Path):
    os.mkfifo(path)
    with pytest.raises(ValueError, match="it is not a regular file"):
        locator.find()


@as_root
@pytest.mark.parametrize("make", [Path.touch, plant])
def test_a_rendezvous_does_not_trust_another_users_file(
    locator: FileLocator, path: Path, make: Callable[[Path], object]
):
    make(path)
    content = path.read_bytes()
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(ValueError, match=f"it belongs to user {OTHER_USER}, and this process to user 0"):
        locator.find()
    assert path.read_bytes() == content


def test_a_rendezvous_does_not_trust_a_file_that_all_can_write(locator: FileLocator, path: Path):
    plant(path)
    path.chmod(0o666)
    with pytest.raises(ValueError, match=r"other users can write to it \(mode 666\)"):
        locator.find()


@pytest.mark.parametrize("make", [None, Path.touch, plant])
def test_a_rendezvous_file_of_an_earlier_job_is_taken_over_for_its_user_alone(
    locator: FileLocator, path: Path, make: Callable[[Path], object] | None
):
    if make is not None:
        make(path)
        path.chmod(0o644)
    assert locator.find()
    assert mode(path) == 0o600


def test_the_files_of_a_job_are_for_its_user_alone(tmp_path: Path):
    """Shared memory, the unix socket of an agent, a new token's file."""
    memory = shared_memory.Mapping.create(str(tmp_path), "job", 4096)
    assert mode(tmp_path / memory.name) == 0o600
    memory.release()
    with address.listen(str(tmp_path), "id"):
        assert mode(address.socket_path(str(tmp_path), "id")) == 0o600
    create_token(tmp_path / "token")
    assert mode(tmp_path / "token") == 0o600


@as_root
def test_another_user_cannot_open_the_files_of_a_job(tmp_path: Path):
    tmp_path.chmod(0o755)
    create_token(tmp_path / "token")
    assert as_other_user(lambda: (tmp_path / "token").read_text()).startswith("PermissionError")


def test_a_token_file_that_others_can_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    own, public = tmp_path / "own", tmp_path / "public"
    for path, bits in ((own, 0o640), (public, 0o644)):
        path.write_text("0123456789abcdef")
        path.chmod(bits)
        assert read_token(path) == "0123456789abcdef"
        assert read_token(path) == "0123456789abcdef"
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert found == [f"other users can read or change the token in {public}: run chmod 600 on it, and set a new token"]
