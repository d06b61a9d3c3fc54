"""Worlds of many ranks, and many clients of a store."""

from __future__ import annotations

import pytest

from benchmarks import clients

pytestmark = pytest.mark.processes


def test_clients_of_a_store_are_counted_in_and_woken() -> None:
    found = clients.measure(40, 2)
    assert min(found) > 0
