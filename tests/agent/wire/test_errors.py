"""The error tree, its codes, and how an error travels."""

from __future__ import annotations

import copy
import pickle
import re
from http import HTTPStatus

import pytest

from rankmesh_agent.wire import errors
from rankmesh_agent.wire.errors import BY_CODE, DistError, from_code

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DistError)]


def test_those_that_mean_a_timeout_are_timeout_errors():
    timeouts = {kind.__name__ for kind in ALL if issubclass(kind, TimeoutError)}
    waits = {"CollectiveTimeoutError", "JoinTimeoutError", "StoreTimeoutError"}
    assert timeouts == {*waits, "GatewayUnreachableError", "StoreUnresponsiveError"}


def test_every_class_has_a_code_of_its_own():
    assert {kind.code: kind for kind in ALL} == BY_CODE
    assert len(BY_CODE) == len(ALL)
    for kind in ALL:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", kind.code)
        assert HTTPStatus(kind.status) >= 400


DATA = {"ranks": [2, 5], "op": "all_reduce", "group": "world", "seq": 0, "address": "10.0.0.1:29500"}


@pytest.mark.parametrize("data", [{}, DATA, {"ranks": range(3)}], ids=["none", "all", "some"])
def test_copies_and_pickles_keep_the_data(data):
    for error in [kind("what happened", **data) for kind in ALL]:
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(twin) is type(error)
            assert str(twin) == twin.message == "what happened"
            assert vars(twin) == vars(error)


def test_an_error_is_raised_again_from_its_code():
    for error in [kind("what happened", **DATA) for kind in ALL]:
        twin = from_code(error.code, error.message, **error.details())
        assert type(twin) is type(error)
        assert vars(twin) == vars(error)
        assert twin.ranks == (2, 5)


def test_details_are_those_that_are_set():
    assert DistError("what").details() == {}
    assert DistError("what", ranks=(0,), seq=0).details() == {"ranks": [0], "seq": 0}


def test_a_newer_peers_code_and_members_are_a_plain_error():
    error = from_code("invented-later", "what happened", group="world", colour="red", seq=None)
    assert type(error) is DistError
    assert error.details() == {"group": "world"}
    assert str(error) == "what happened"
