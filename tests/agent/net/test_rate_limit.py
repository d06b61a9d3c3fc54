"""Rate limits of warnings and addresses."""

from __future__ import annotations

import pytest

from rankmesh_agent.net import rate_limit
from rankmesh_agent.net.rate_limit import AddressRateLimit, WarningInterval


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(rate_limit.time, "monotonic", lambda: now[0])
    return now


def test_a_warning_a_minute(clock):
    warning = WarningInterval()
    assert [warning.is_due(), warning.is_due()] == [True, False]
    clock[0] += 60
    assert [warning.is_due(), warning.is_due()] == [True, False]


def test_an_address_has_a_burst_and_a_rate(clock):
    limit = AddressRateLimit(2.0, 3)
    assert [limit.allows("192.0.2.1") for _ in range(4)] == [True, True, True, False]
    assert limit.allows("192.0.2.2")
    clock[0] += 1
    assert [limit.allows("192.0.2.1") for _ in range(3)] == [True, True, False]
    clock[0] += 1000
    assert [limit.allows("192.0.2.1") for _ in range(4)] == [True, True, True, False]


def test_a_network_of_ipv6_is_one_address():
    limit = AddressRateLimit(0.0, 1)
    assert limit.allows("2001:db8::1")
    assert not limit.allows("2001:db8::2%eth0")
    assert limit.allows("2001:db8:0:1::1")
    assert limit.allows("::ffff:192.0.2.1")
    assert limit.allows("::ffff:192.0.2.2")


def test_it_remembers_the_latest_addresses_only(monkeypatch):
    monkeypatch.setattr(rate_limit, "_MAX_ADDRESSES", 2)
    limit = AddressRateLimit(0.0, 1)
    found = [limit.allows(address) for address in ("a", "b", "a", "c", "a", "b")]
    assert found == [True, True, False, True, False, True]
