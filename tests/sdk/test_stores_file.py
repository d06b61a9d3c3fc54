"""FileStore: the file, its users, and its failures."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

import rankmesh as dist
from rankmesh._stores.key_file import KeyFile, MovedFileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def made(path: Path) -> Iterator[Callable[..., dist.FileStore]]:
    """Makes stores at the path, and closes them."""
    stores = []

    def make(*arguments: int) -> dist.FileStore:
        stores.append(dist.FileStore(str(path), *arguments))
        stores[-1].set_timeout(20)
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_its_path_is_the_given_one(made, path, monkeypatch):
    assert made().path == str(path)
    monkeypatch.chdir(path.parent)
    relative = dist.FileStore("store")
    assert relative.path == "store"
    monkeypatch.chdir("/")
    relative.set("k", "v")
    assert made().get("k") == b"v"
    relative.close()
    assert dist.FileStore(path).path == str(path)  # type: ignore[arg-type]  # a Path works, too


def test_the_file_is_private_and_closed_with_the_store(made, path):
    path.touch()  # an empty file works
    before = len(os.listdir("/proc/self/fd"))
    store = made(1)
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not os.listdir(path.parent)
    made().set("k", "v")
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


class TestUsers:
    @pytest.mark.parametrize("together", [True, False])
    def test_the_last_one_removes_the_file(self, made, path, together):
        first = made(2)
        second = made(2) if together else None
        first.set("k", "v")
        first.close()
        assert path.exists()
        second = second or made(2)
        assert second.get("k") == b"v"
        second.close()
        assert not path.exists()
        assert not made(1).check(["k"])  # the path can be used again

    def test_not_if_their_number_is_unknown(self, made, path):
        first = made()
        first.set("k", "v")
        first.close()
        assert path.exists()
        assert made().get("k") == b"v"

    def test_a_collected_one_is_closed(self, path):
        store = dist.FileStore(str(path), 1)
        store.set("k", "v")
        del store
        gc.collect()
        assert not path.exists()

    def test_a_forked_child_is_not_a_user(self, made, path):
        store = made(1)
        store.set("k", "1")
        child = os.fork()
        if child == 0:
            try:
                store.add("k", 1)
                store.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert store.get("k") == b"2"
        store.close()
        assert not path.exists()


class TestFailures:
    def test_no_file(self, tmp_path):
        with pytest.raises(dist.DistStoreError, match=r"nowhere/store as a FileStore: its directory does not exist"):
            dist.FileStore(f"{tmp_path}/nowhere/store")
        with pytest.raises(dist.DistStoreError, match="Is a directory"):
            dist.FileStore(str(tmp_path))

    @pytest.mark.parametrize("content", [b"hello", b"hello, another program's text, long enough"])
    def test_another_programs_file(self, path, content):
        path.write_bytes(content)
        with pytest.raises(dist.DistStoreError, match=f"{path} is no FileStore's file"):
            dist.FileStore(str(path))
        assert path.read_bytes() == content

    def test_another_programs_database(self, path):
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE kv (key, value)")
        with pytest.raises(dist.DistStoreError, match=f"{path} is no FileStore's file"):
            dist.FileStore(str(path))

    @pytest.mark.parametrize("size", [20, 5000])
    def test_a_damaged_file(self, made, path, size):
        store = made()
        store.set("k", "v" * 20000)
        os.truncate(path, size)
        with pytest.raises(dist.DistStoreError, match=rf"{path} is damaged: .* remove it"):
            store.get("k")

    @pytest.mark.parametrize("what", ["removed", "replaced"])
    def test_a_file_that_was(self, made, path, what):
        store = made()
        store.set("k", "v")
        path.unlink()
        if what == "replaced":
            made().set("k", "another")
        for call in (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.num_keys()):
            with pytest.raises(dist.DistStoreError, match=f"was {what} while it was in use"):
                call()
        assert path.exists() == (what != "removed")

    def test_a_writer_that_died_while_it_wrote(self, made, path):
        made().set("a", "1")
        ready, done = os.pipe()
        child = os.fork()
        if child == 0:
            file = KeyFile(str(path))
            file._rows("PRAGMA cache_size = 1")  # so that the file is written before the commit
            file._rows("BEGIN EXCLUSIVE")
            for number in range(1000):
                file._rows("INSERT OR REPLACE INTO kv VALUES (?, ?)", f"k{number}", b"x" * 500)
            os.write(done, b".")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert made().list_keys() == ["a"]
        for descriptor in (ready, done):
            os.close(descriptor)

    def test_a_full_disk(self, made):
        store = made()
        store.set("k", "1")
        pages = store._store.file._rows("PRAGMA page_count")[0][0]
        store._store.file._rows(f"PRAGMA max_page_count = {pages}")
        for call in (lambda: store.set("k", "2" * 9999), lambda: store.multi_set(["k", "l"], ["2", "2" * 9999])):
            with pytest.raises(dist.DistStoreError, match="disk is full"):
                call()
        assert store.get("k") == b"1"
        assert store.list_keys() == made().list_keys() == ["k"]
        store.set("k", "3")
        assert made().get("k") == b"3"

    def test_no_free_descriptor(self, made, path):
        store = made()
        os.close(free := os.dup(0))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            for call in (lambda: store.set("k", "v"), made, lambda: KeyFile(f"{path}-new")):
                with pytest.raises(dist.DistStoreError, match=r"no free file descriptor .* ulimit -n"):
                    call()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        store.set("k", "v")

    def test_a_file_system_without_locks(self, path, monkeypatch):
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
        with pytest.raises(dist.DistStoreError, match=r"cannot use .* No locks available"):
            dist.FileStore(str(path))

    def test_a_user_that_holds_the_lock(self, made, path):
        store = made()
        store._store.file._lock_seconds = 0.1
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(dist.errors.StoreTimeoutError, match=rf"{path} was locked for 0\.1 s"):
                store.set("k", "v")
        store.set("k", "v")

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            ((None,), "NoneType"),
            ((b"bytes",), "file_name must be a str"),
            (("/tmp/x", "1"), "world_size must be an int"),
        ],
    )
    def test_arguments(self, arguments, what):
        with pytest.raises(TypeError, match=what):
            dist.FileStore(*arguments)


def test_a_user_that_waited_for_a_removed_file_makes_a_new_one(path):
    first = KeyFile(str(path), user=True)
    found = []

    def join() -> None:
        second = KeyFile(str(path))
        found.append(second.keys())
        second.close()

    with first._transaction():
        first._rows("INSERT INTO kv VALUES ('k', 'v')")
        waiting = threading.Thread(target=join)
        waiting.start()
        time.sleep(0.2)
        first._remove()
    first.close()
    waiting.join(10)
    assert found == [[]]
    assert path.exists()


def use_again_and_again(path: str, answers: Connection) -> None:
    """Open the file, write, empty and remove it, as jobs at one ``file://`` do that meet and end."""
    errors = []
    for _ in range(500):
        try:
            with contextlib.closing(KeyFile(path)) as file:
                with contextlib.suppress(FileNotFoundError):
                    if mode := os.stat(path).st_mode & 0o077:
                        errors.append(f"other users have it: {mode:o}")
                file.change(lambda values: (None, {"k": b"v"}))
                file.change(lambda values: (None, dict.fromkeys(values)))
                file.remove_if_empty()
        except MovedFileError:
            continue  # one of the others has removed it
        except dist.DistStoreError as error:
            errors.append(str(error))
    answers.send(errors)


@pytest.mark.processes
def test_users_that_remove_the_file_and_those_that_open_it_meanwhile(path):
    forking = multiprocessing.get_context("fork")
    pipes = [forking.Pipe(duplex=False) for _ in range(4)]
    users = [forking.Process(target=use_again_and_again, args=(str(path), answers)) for _, answers in pipes]
    for user in users:
        user.start()
    assert [found.poll(120) and found.recv() for found, _ in pipes] == [[]] * 4
    for user in users:
        user.join(60)
    assert [user.exitcode for user in users] == [0] * 4
    for pipe in itertools.chain(*pipes):
        pipe.close()
