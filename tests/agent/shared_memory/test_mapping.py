"""Memory between processes, and sleeping on it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from rankmesh_agent.shared_memory import mapping as shared_memory
from rankmesh_agent.shared_memory.mapping import (
    Mapping,
    futex_wait,
    futex_wake,
    make_private,
    timespec_of,
    unsupported,
)
from rankmesh_agent.shared_memory.orphans import remove_orphans
from rankmesh_agent.wire.errors import DistNetworkError

SIZE = 8192


def test_memory_is_shared_by_name_until_it_is_released(shm):
    made = Mapping.create(str(shm), "job", SIZE)
    file = os.fstat(made.descriptor)
    assert file.st_mode & 0o777 == 0o600, "no other user may read it"
    assert file.st_blocks * 512 >= SIZE, "its space is reserved"
    assert [path.name for path in shm.iterdir()] == [made.name]
    assert made.name.startswith(f"rankmesh-job-{os.getpid()}.")
    opened = Mapping.open(str(shm), made.name, SIZE)
    assert (made.bytes.size, opened.bytes.size) == (SIZE, SIZE)
    assert not made.bytes.any(), "it is zero at first"
    made.bytes[SIZE - 1] = 7
    assert opened.bytes[SIZE - 1] == 7
    opened.bytes[0] = 8
    assert made.bytes[0] == 8
    assert [path.name for path in shm.iterdir()] == [made.name], "only its creator unlinks it"
    made.release()
    assert list(shm.iterdir()) == []
    made.bytes[1] = 9
    assert opened.bytes[1] == 9, "those who mapped it keep it"
    made.release()  # a second time does nothing
    with pytest.raises(DistNetworkError, match=f"cannot open shared memory {shm}/{made.name}: No such file"):
        Mapping.open(str(shm), made.name, SIZE)


def test_pages_become_private_with_their_contents(shm):
    made = Mapping.create(str(shm), "job", 3 * 4096)
    opened = Mapping.open(str(shm), made.name, 3 * 4096)
    opened.bytes[:] = 1
    assert make_private(made.address + 4096, 4096)
    assert (made.bytes == 1).all()
    opened.bytes[:] = 2
    assert [made.bytes[0], made.bytes[4096], made.bytes[8191], made.bytes[8192]] == [2, 1, 1, 2]
    made.bytes[:] = 3
    assert [opened.bytes[0], opened.bytes[4096], opened.bytes[8191], opened.bytes[8192]] == [3, 2, 2, 3]
    with pytest.raises(OSError, match="Cannot allocate memory"):
        make_private(made.address, 1 << 60)
    assert (made.bytes == 3).all()


def test_pages_without_memory_for_a_copy_become_private_and_zero(shm, monkeypatch):
    made = Mapping.create(str(shm), "job", 3 * 4096)
    opened = Mapping.open(str(shm), made.name, 3 * 4096)
    made.release()
    made.bytes[:] = 1
    original = shared_memory._mmap
    no_copy = shared_memory._MAP_FAILED
    monkeypatch.setattr(shared_memory, "_mmap", lambda at, *rest: original(at, *rest) if at else no_copy)
    assert not make_private(made.address + 4096, 4096)
    opened.bytes[:] = 2
    assert [made.bytes[page * 4096] for page in range(3)] == [2, 0, 2]


def test_an_orphan_that_was_removed_before_it_was_locked_is_made_again(shm, monkeypatch):
    lock, sweeps = fcntl.flock, iter([True, False])

    def sweep_first(descriptor, operation):
        if operation == fcntl.LOCK_EX and next(sweeps):
            remove_orphans(str(shm))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    made = Mapping.create(str(shm), "job", SIZE)
    assert [path.name for path in shm.iterdir()] == [made.name]
    remove_orphans(str(shm))
    Mapping.open(str(shm), made.name, SIZE)


def test_the_limit_of_descriptors_is_named(shm, monkeypatch):
    made = Mapping.create(str(shm), "job", SIZE)

    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        with pytest.raises(DistNetworkError, match=r"cannot open shared memory .*RLIMIT_NOFILE"):
            Mapping.open(str(shm), made.name, SIZE)


def test_orphans_are_removed_and_what_is_no_orphan_stays(shm):
    program = f"""if True:
        import os
        from rankmesh_agent.shared_memory.mapping import Mapping
        made = Mapping.create({str(shm)!r}, "job", {SIZE})
        os.kill(os.getpid(), 9)"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (orphan,) = shm.iterdir()
    alive = Mapping.create(str(shm), "job", SIZE)
    others = {"rankmesh-job-1-0123456789abcdef", "rankmesh-rendezvous", "other-job-1.0123456789abcdef"}
    for name in others:
        (shm / name).touch()
    (shm / "rankmesh-a-1.0123456789abcdef").mkdir()
    (shm / "rankmesh-b-1.0123456789abcdef").symlink_to(orphan)
    kept = {path.name for path in shm.iterdir()} - {orphan.name}
    remove_orphans(str(shm))
    assert {path.name for path in shm.iterdir()} == kept
    alive.release()
    remove_orphans(f"{shm}/missing")


def test_private_memory_has_no_name_and_is_nobody_elses():
    one, other = Mapping.anonymous(SIZE), Mapping.anonymous(SIZE)
    one.bytes[:] = 1
    assert one.bytes.size == SIZE
    assert one.bytes.ctypes.data == one.address
    assert not other.bytes.any()


def test_mapped_memory_needs_no_descriptor(shm):
    before = len(os.listdir("/proc/self/fd"))
    made = Mapping.create(str(shm), "job", SIZE)
    opened = Mapping.open(str(shm), made.name, SIZE)
    made.release()
    assert len(os.listdir("/proc/self/fd")) == before
    made.bytes[-1] = 7
    assert opened.bytes[-1] == 7


def test_a_file_that_cannot_be_mapped(shm, tmp_path):
    with open(tmp_path / "read only", "wb") as file, pytest.raises(PermissionError):
        Mapping(file.fileno(), SIZE)


@pytest.mark.parametrize("job", ["", "a job", "../../etc", "käse", "x" * 1000, "a\0b"])
def test_any_job_makes_a_name_that_peers_accept(shm, job):
    made = Mapping.create(str(shm), job, SIZE)
    assert len(made.name) <= 80
    (file,) = shm.iterdir()
    assert file.name.startswith("rankmesh-")
    Mapping.open(str(shm), made.name, SIZE)
    assert Mapping.create(str(shm), job, SIZE).name != made.name
    made.release()


NAME = "rankmesh-job-1.0123456789abcdef"


@pytest.mark.parametrize(
    "name",
    [
        *("", "passwd", "../rankmesh-a", "rankmesh-", f"../{NAME}", f"{NAME}\n", f"{NAME}/.."),
        *("rankmesh-a/b-1.0123456789abcdef", "rankmesh-ä-1.0123456789abcdef", "rankmesh-job-\u0661.0123456789abcdef"),
    ],
)
def test_other_names_are_refused(shm, name):
    with pytest.raises(DistNetworkError, match="is not a name of shared memory"):
        Mapping.open(str(shm), name, SIZE)


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1, 1 << 40])
def test_another_size_is_refused(shm, size):
    made = Mapping.create(str(shm), "job", SIZE)
    with pytest.raises(DistNetworkError, match=f"differs from its announcement of {size} bytes"):
        Mapping.open(str(shm), made.name, size)


def test_a_symlink_is_refused(shm, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(SIZE))
    made = Mapping.create(str(shm), "job", SIZE)
    made.release()
    (shm / (name := "rankmesh-job-1.0123456789abcdef")).symlink_to(secret)
    with pytest.raises(DistNetworkError, match="cannot open shared memory"):
        Mapping.open(str(shm), name, SIZE)


def test_no_directory(shm):
    with pytest.raises(DistNetworkError, match=f"cannot make shared memory in {shm}/none: No such .*RANKMESH_SHM_DIR"):
        Mapping.create(f"{shm}/none", "job", SIZE)


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        (errno.ENOSPC, r"has no room for 3 MiB of shared memory \(\d+ MiB are free\); .*docker run --shm-size"),
        (errno.ENOMEM, r"has no room"),
        (errno.EFBIG, r"cannot map shared memory in .*: File too large"),
    ],
)
def test_no_room_is_said_and_leaves_nothing(shm, monkeypatch, code, reported):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DistNetworkError, match=reported):
        Mapping.create(str(shm), "job", 3 << 20)
    assert list(shm.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before


# Sleeping


def test_sleep_does_not_begin_when_the_word_has_changed(shm):
    memory = Mapping.create(str(shm), "job", SIZE)
    memory.bytes[0] = 1
    began = time.monotonic()
    futex_wait(memory.address, 0, timespec_of(30))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("count", [0, (5 << 32) + 70_000])
def test_a_sleep_ends_after_its_timeout(shm, count):
    """The low half of a large count is compared."""
    memory = Mapping.create(str(shm), "job", SIZE)
    memory.bytes.view("u8")[0] = count
    began = time.monotonic()
    futex_wait(memory.address, count, timespec_of(0.05))
    assert time.monotonic() - began >= 0.04


def test_wake_wakes_all_threads(shm):
    memory = Mapping.create(str(shm), "job", SIZE)
    word = memory.bytes.view("u4")

    def rest() -> None:
        while not word[0]:
            futex_wait(memory.address, 0, timespec_of(30))

    sleepers = [threading.Thread(target=rest) for _ in range(4)]
    for sleeper in sleepers:
        sleeper.start()
    word[0] = 1
    deadline = time.monotonic() + 10
    while any(sleeper.is_alive() for sleeper in sleepers) and time.monotonic() < deadline:
        futex_wake(memory.address)
        sleepers[0].join(0.01)
    assert not any(sleeper.is_alive() for sleeper in sleepers)


def test_sleep_and_wake_across_processes(shm):
    rounds = 500
    memory = Mapping.create(str(shm), "job", SIZE)
    program = f"""if True:
        from rankmesh_agent.shared_memory.mapping import Mapping, futex_wait, futex_wake, timespec_of
        print('ready', flush=True)
        memory = Mapping.open({str(shm)!r}, {memory.name!r}, {SIZE})
        words = memory.bytes.view("u8")
        for turn in range(1, {rounds} + 1):
            while words[0] < turn:
                futex_wait(memory.address, turn - 1, timespec_of(30))
            words[8] = turn
            futex_wake(memory.address + 64)"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    words = memory.bytes.view("u8")
    began = time.monotonic()
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for turn in range(1, rounds + 1):
            words[0] = turn
            futex_wake(memory.address)
            while words[8] < turn:
                assert child.poll() in (None, 0)
                futex_wait(memory.address + 64, turn - 1, timespec_of(30))
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.communicate()
    assert time.monotonic() - began < 29, "no wake-up was missed: a missed one costs a slice of 30 s"


@pytest.mark.parametrize(
    ("system", "machine", "core", "reported"),
    [
        ("linux", "x86_64", None, ""),
        ("linux", "aarch64", None, "shared memory needs the compiled core on aarch64: RANKMESH_NATIVE is 0"),
        ("linux", "aarch64", shared_memory, ""),
        ("darwin", "arm64", None, "shared memory needs Linux, this is darwin"),
    ],
)
def test_where_memory_can_be_shared(monkeypatch, system, machine, core, reported):
    monkeypatch.setattr(shared_memory.sys, "platform", system)
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: machine)
    monkeypatch.setattr(shared_memory, "TOTAL_STORE_ORDER", machine == "x86_64")
    monkeypatch.setattr(shared_memory.native, "core", core)
    monkeypatch.setattr(shared_memory.native, "reason", "RANKMESH_NATIVE is 0")
    assert unsupported() == reported
