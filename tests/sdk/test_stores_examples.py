"""The examples of the reference page, with the output it documents; ports come from the kernel, long waits are short.

Source: https://pytorch.org/docs/2.1/distributed.html#distributed-key-value-store
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from support.processes import free_port

import rankmesh as dist


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30))
    yield store
    store.close()


def test_tcp_store():
    port = free_port()
    made = []
    server = threading.Thread(
        target=lambda: made.append(dist.TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=30)))
    )
    server.start()
    client_store = dist.TCPStore("127.0.0.1", port, 2, False)
    server.join(30)
    (server_store,) = made
    server_store.set("first_key", "first_value")
    assert client_store.get("first_key") == b"first_value"
    client_store.close()
    server_store.close()


def test_hash_store():
    store = dist.HashStore()
    threading.Thread(target=store.set, args=("first_key", "first_value")).start()
    assert store.get("first_key") == b"first_value"


def test_file_store(tmp_path):
    store1 = dist.FileStore(f"{tmp_path}/filestore", 2)
    store2 = dist.FileStore(f"{tmp_path}/filestore", 2)
    store1.set("first_key", "first_value")
    assert store2.get("first_key") == b"first_value"
    store1.close()
    store2.close()


def test_calls(store):
    store.set("first_key", "first_value")
    assert store.get("first_key") == b"first_value"
    assert store.num_keys() == 2
    store.compare_set("first_key", "first_value", "second_value")
    assert store.get("first_key") == b"second_value"
    assert store.delete_key("first_key") is True
    assert store.delete_key("bad_key") is False
    store.add("first_key", 1)
    store.add("first_key", 6)
    assert store.get("first_key") == b"7"


@pytest.mark.parametrize("of_the_call", [False, True])
def test_timeouts(store, of_the_call):
    if not of_the_call:
        store.set_timeout(timedelta(seconds=0.2))
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"waited 0\.2 s, .*bad_key"):
        store.wait(["bad_key"], *([timedelta(seconds=0.2)] if of_the_call else []))
    assert 0.2 <= time.monotonic() - began < 20
