"""The gateway's address in a store that all ranks share."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from support.processes import wait_until

from rankmesh._rendezvous.hosted import GatewayAddress
from rankmesh._rendezvous.store import StoreLocator
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import DistNetworkError


class Plain:
    """The least that a store can do, with an error of its own."""

    class TooLateError(Exception):
        pass

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not all(key in self.values for key in keys):
            if time.monotonic() > deadline:
                raise self.TooLateError
            time.sleep(0.005)


class Checking(Plain):
    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise AssertionError("it can be asked without waiting")


class PureVirtual(Plain):
    """As a Python subclass of torch's Store that has no ``check`` of its own."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError('Tried to call pure virtual function "Store::check"')


@pytest.mark.parametrize("kind", [Plain, Checking, PureVirtual])
def test_rank_0_hosts_and_the_others_find_it(opened, settings, answers, kind):
    store = kind()
    other = opened(StoreLocator, store, 1, settings)
    assert other.find() is None
    rank_0 = opened(StoreLocator, store, 0, settings)
    url = wait_until(other.find, "an answer")
    assert url == rank_0.find()
    assert answers(url)
    assert set(store.values) == {"rankmesh/job/gateway"}


def test_the_same_store_serves_again_and_an_old_address_is_not_believed(opened, settings):
    store = Plain()
    first = opened(StoreLocator, store, 0, settings)
    late = opened(StoreLocator, store, 1, settings)
    first.close()
    assert late.find() is None, "that gateway has ended"
    second = opened(StoreLocator, store, 0, settings)
    assert wait_until(late.find, "an answer") == second.find()
    store.set("rankmesh/job/gateway", GatewayAddress(second.find(), "another's").to_json())
    assert late.find() is None, "another gateway is at that port"
    store.set("rankmesh/job/gateway", "nonsense")
    assert late.find() is None


class Broken(Plain):
    def broken(self, *arguments: object) -> None:
        raise ConnectionError("the store's server is gone")

    set = get = wait = broken


def test_a_broken_store_differs_from_an_empty_one(opened, settings):
    says_so = r"store= \(Broken\) failed: ConnectionError: the store's server is gone"
    with pytest.raises(DistNetworkError, match=says_so):
        StoreLocator(Broken(), 0, settings)
    with pytest.raises(DistNetworkError, match=says_so):
        opened(StoreLocator, Broken(), 1, settings).find()
    store = Broken()
    store.wait = lambda keys, timeout: None
    with pytest.raises(DistNetworkError, match=says_so):
        opened(StoreLocator, store, 1, settings).find()


class At(Plain):
    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.host, self.port = host, port


class Wrapped(Plain):
    def __init__(self, inner: Plain) -> None:
        super().__init__()
        self.underlying_store = inner


def test_ranks_listen_where_they_face_the_stores_host(opened, settings):
    assert opened(StoreLocator, Wrapped(Wrapped(At("127.0.0.3", 1))), 1, settings).bind_host == "127.0.0.3"
    assert opened(StoreLocator, At("127.0.0.3", 1), 1, Settings(bind="127.0.0.2")).bind_host == "127.0.0.2"
    assert opened(StoreLocator, Plain(), 1, settings).bind_host == "127.0.0.1"
