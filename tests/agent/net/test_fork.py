"""What forked children have of their parent's connections."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable

from rankmesh_agent.net.fork import close_in_children
from rankmesh_agent.net.sockets import bind


def in_a_child(check: Callable[[], object]) -> bool:
    """Return what a forked child finds."""
    child = os.fork()
    if child == 0:
        found = False
        try:
            found = bool(check())
        finally:
            os._exit(not found)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def has_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)


def test_a_childs_copies_are_closed_and_the_parents_stay_open():
    one, other = socket.socketpair()
    with close_in_children(one), other, bind("127.0.0.1", 0, purpose="a test listens") as listener:
        assert in_a_child(lambda: not has_socket(one.fileno()) and not has_socket(listener.fileno()))
        assert in_a_child(lambda: has_socket(other.fileno()))  # not ours
        one.send(b"still open")
        assert other.recv(100) == b"still open"


def test_a_child_may_close_what_it_has_inherited_and_reuse_the_number():
    one, other = socket.socketpair()
    with close_in_children(one), other:

        def close_and_open() -> bool:
            number = one.fileno()
            one.close()
            return os.dup(other.fileno()) == number and has_socket(number)

        assert in_a_child(close_and_open)


def test_descriptors_that_the_parent_has_closed_are_others_by_now():
    one, other = socket.socketpair()
    number = close_in_children(one).fileno()
    with other, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        close_in_children(process.stdin)
        process.communicate(b"\n", timeout=60)
        one.close()
        with os.fdopen(os.open(os.devnull, os.O_RDONLY)), socket.socket() as later:
            os.dup2(later.fileno(), number) if later.fileno() != number else None
            assert in_a_child(lambda: has_socket(number))
