"""FileStore: the file, its users, and its failures."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rankmesh as dist
from rankmesh._stores.log import SET, Log, Record
from rankmesh_agent.net.deadline import Deadline

IDENTITY = range(17, 32)
"""Bytes of the file that are a random name."""


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


def test_the_file_is_private_and_not_kept_open(made, path):
    path.touch()  # an empty file works
    before = len(os.listdir("/proc/self/fd"))
    store = made(1)
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert len(os.listdir("/proc/self/fd")) == before
    store.close()
    made()
    assert path.stat().st_mode & 0o777 == 0o600


def values_of(store: dist.FileStore) -> list[tuple[str, bytes]]:
    keys = store.list_keys()
    return sorted(zip(keys, store.multi_get(keys), strict=True)) if keys else []


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

    def test_a_closed_store(self, made):
        store = made(1)
        store.close()
        store.close()
        with pytest.raises(dist.DistStoreError, match="is closed"):
            store.get("k")

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

    def test_a_damaged_file(self, made, path):
        first, second = made(), made()
        first.set("k", "v")
        size = path.stat().st_size
        with path.open("ab") as file:
            file.write(b"=" + b"\xff" * 100)
        with pytest.raises(dist.DistStoreError, match=rf"{path} is damaged at byte {size}: .* remove it"):
            second.get("k")

    def test_every_damage_is_named_and_a_cut_file_is_an_earlier_one(self, path):
        states = [[]]
        store = dist.FileStore(str(path))
        for key, value in (("key", "value"), ("schlüssel", "1"), ("key", "another"), ("empty", "")):
            store.set(key, value)
            states.append(values_of(store))
        whole = path.read_bytes()
        store.close()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            assert values_of(dist.FileStore(str(path))) in states
        named = "is damaged at byte|is no FileStore's file"
        generator = random.Random(1)
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= generator.randrange(1, 256)
            path.write_bytes(damaged)
            if IDENTITY.start <= place < IDENTITY.stop:  # a random name of the file
                assert values_of(dist.FileStore(str(path))) == states[-1]
            else:
                with pytest.raises(dist.DistStoreError, match=rf"{path} ({named})"):
                    dist.FileStore(str(path))

    @pytest.mark.parametrize("what", ["removed", "replaced", "cut"])
    def test_a_file_that_was(self, made, path, what):
        store = made()
        store.set("k", "v")
        if what == "cut":
            os.truncate(path, 20)
        else:
            path.unlink()
        if what == "replaced":
            made().set("k", "another size")
        reason = "removed" if what == "removed" else "replaced"
        for call in (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.num_keys()):
            with pytest.raises(dist.DistStoreError, match=f"was {reason} while it was in use"):
                call()
        assert path.exists() == (what != "removed")

    def test_a_writer_that_died_while_it_wrote(self, made, path):
        first = made()
        first.set("a", "1")
        whole = path.stat().st_size
        first.set("b", "2")
        os.truncate(path, path.stat().st_size - 1)
        second = made()
        assert second.list_keys() == ["a"]
        assert path.stat().st_size > whole
        second.set("c", "3")
        third = made()
        assert third.list_keys() == ["a", "c"]

    def test_a_writer_that_died_while_it_wrote_the_beginning(self, made, path):
        made().close()
        for size in (1, 20, 31):
            os.truncate(path, size)
            store = made()
            store.set("k", "v")
            assert made().list_keys() == ["k"]

    def test_a_full_disk(self, made, monkeypatch):
        store = made()
        store.set("k", "1")

        def half(descriptor, data, at, write=os.pwrite):
            write(descriptor, data[: len(data) // 2], at)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", half)
            for call in (lambda: store.set("k", "2"), lambda: store.multi_set(["k", "l"], ["2", "2"])):
                with pytest.raises(dist.DistStoreError, match="No space left on device"):
                    call()
        assert store.get("k") == b"1"
        assert store.list_keys() == made().list_keys() == ["k"]
        store.set("k", "3")
        assert made().get("k") == b"3"

    def test_a_user_that_holds_the_lock(self, made, path, monkeypatch):
        monkeypatch.setattr("rankmesh._stores.file._LOCK_SECONDS", 0.1)
        monkeypatch.setattr("rankmesh._stores.file._LEAVE_SECONDS", 0.1)
        store = made()
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(dist.StoreTimeoutError, match=rf"{path} was locked for 0\.1 s"):
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


class TestLog:
    def test_readers_share_the_lock(self, path):
        first, second = Log(str(path)), Log(str(path))
        with first.locked(Deadline(1), exclusive=False, create=True), second.locked(Deadline(1), exclusive=False):
            assert first.read() == second.read() == []
        with (
            first.locked(Deadline(1), exclusive=False),
            pytest.raises(dist.StoreTimeoutError),
            second.locked(Deadline(0.05), exclusive=True),
        ):
            pass

    def test_a_user_that_waited_for_a_removed_file_makes_a_new_one(self, path):
        first, second = Log(str(path)), Log(str(path))
        found = []

        def join() -> None:
            with second.locked(Deadline(10), exclusive=True, create=True):
                found.append(second.read())

        with first.locked(Deadline(1), exclusive=True, create=True):
            first.append([Record(SET, "k")])
            waiting = threading.Thread(target=join)
            waiting.start()
            first.remove()
        waiting.join(10)
        assert found == [[]]
        assert path.exists()
