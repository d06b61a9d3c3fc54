"""Init methods that a program brings along."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from support.processes import free_port

from rankmesh._rendezvous import handlers
from rankmesh._rendezvous.handlers import register_rendezvous_handler, rendezvous

Called = list[tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", {})


@pytest.fixture
def called() -> Called:
    """What the handler of ``mine://`` was called with; it yields what torch's handlers do."""
    calls: Called = []

    def mine(url: str, **options: Any) -> Iterator[tuple[object, int, int]]:
        calls.append((url, options))
        yield "a store", 1, 2
        yield "a store after re-rendezvous", 0, 1

    register_rendezvous_handler("Mine", mine)
    return calls


def test_a_handler_is_called_by_its_scheme_with_what_is_known(called):
    found = rendezvous("mine://somewhere/x?a=b", 1, 2, timeout=timedelta(seconds=3))
    assert called == [], "nothing happens until the first result is asked for"
    assert next(found) == ("a store", 1, 2)
    assert next(found) == ("a store after re-rendezvous", 0, 1)
    assert called == [("mine://somewhere/x?a=b&rank=1&world_size=2", {"timeout": timedelta(seconds=3)})]


@pytest.mark.parametrize(
    ("given", "url"),
    [({}, "mine://x"), ({"rank": 0}, "mine://x?rank=0"), ({"world_size": 4}, "mine://x?world_size=4")],
)
def test_what_is_left_out_is_the_handlers_to_find(called, given, url):
    next(rendezvous("MINE://x", **given))
    assert [url for url, _ in called] == [url]


def test_saying_it_twice_is_refused(called):
    with pytest.raises(ValueError, match="says rank and world_size already"):
        next(rendezvous("mine://x?rank=0", 1, 2))


def test_a_scheme_nobody_registered(called):
    with pytest.raises(RuntimeError, match="no rendezvous handler for other://, only for file://, mine://, tcp://"):
        next(rendezvous("other://x"))


def test_the_stores_built_in(tmp_path):
    for url in (f"file://{tmp_path}/store", f"tcp://127.0.0.1:{free_port()}"):
        store, rank, world_size = next(rendezvous(url, 0, 1, timeout=timedelta(seconds=5)))
        assert (rank, world_size, store.timeout) == (0, 1, timedelta(seconds=5))
        store.set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "file:///tmp/meet", "tcp://127.0.0.1:1?rank=0"])
def test_the_stores_built_in_need_to_know_rank_and_world_size(url):
    with pytest.raises(ValueError, match="pass rank= and world_size="):
        next(rendezvous(url))


def test_a_handler_that_yields_nothing():
    register_rendezvous_handler("empty", lambda url, **options: iter(()))
    with pytest.raises(RuntimeError, match="empty:// yielded nothing"):
        next(rendezvous("empty://x"))


@pytest.mark.parametrize("scheme", ["mine", "MINE", "tcp", "File", "env", "http"])
def test_a_scheme_is_registered_once(called, scheme):
    with pytest.raises(RuntimeError, match="already"):
        register_rendezvous_handler(scheme, lambda url: iter(()))


def test_something_that_cannot_be_called():
    with pytest.raises(TypeError, match="must be a function"):
        register_rendezvous_handler("mine", "a module")
