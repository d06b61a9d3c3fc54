"""Looking around before going to sleep: when it is done, and when it is not."""

from __future__ import annotations

import os
import socket

import pytest

from rankmesh_agent.store import lookout
from rankmesh_agent.store.lookout import Lookout


@pytest.fixture(autouse=True)
def cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


class Answers:
    """Something to look at: what it says to the first looks, and 0 to all others."""

    def __init__(self, *first: object) -> None:
        self._first = list(first)
        self.looks = 0

    def __call__(self) -> object:
        self.looks += 1
        found = self._first.pop(0) if self._first else 0
        if isinstance(found, BaseException):
            raise found
        return found


def test_what_is_there_is_returned_at_once():
    answers = Answers("here")
    assert Lookout(answers).look() == "here"
    assert answers.looks == 1


def test_what_comes_soon_is_waited_for(monkeypatch):
    monkeypatch.setattr(lookout, "SECONDS", 60.0)
    assert Lookout(Answers(0, [], BlockingIOError(), b"", "later")).look() == "later"


def test_arguments_are_passed_on():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"word")
        assert Lookout(ours.recv, 2, socket.MSG_DONTWAIT).look() == b"wo"


def test_errors_are_the_callers():
    with pytest.raises(ConnectionResetError):
        Lookout(Answers(ConnectionResetError())).look()


def test_the_more_often_it_is_in_vain_the_rarer_it_is_done(monkeypatch):
    monkeypatch.setattr(lookout, "SECONDS", 0.0)
    answers = Answers()
    one = Lookout(answers)
    looked = []
    for number in range(400):
        before = answers.looks
        assert one.look() is None
        if answers.looks > before:
            looked.append(number)
    assert looked == [0, 2, 6, 14, 30, 62, 126, 190, 254, 318, 382]


def test_a_message_makes_it_worth_while_again(monkeypatch):
    monkeypatch.setattr(lookout, "SECONDS", 0.0)
    answers = Answers(0, "here")
    one = Lookout(answers)
    assert [one.look() for _ in range(6)] == [None, None, "here", None, None, None]
    assert answers.looks == 4


def test_a_single_core_has_nobody_to_look_for(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    answers = Answers("here")
    one = Lookout(answers)
    assert [one.look() for _ in range(3)] == [None] * 3
    assert answers.looks == 0
