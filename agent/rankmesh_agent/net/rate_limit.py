"""Rate limits: of repeated warnings, and of what one address may do."""

from __future__ import annotations

import ipaddress
import time

_WARN_SECONDS = 60.0
_MAX_ADDRESSES = 4096


class WarningInterval:
    """Limits a warning to one a minute."""

    _next = 0.0

    def is_due(self) -> bool:
        """Return whether the last warning is a minute ago; then the caller logs the next one."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _WARN_SECONDS
        return True


class AddressRateLimit:
    """A token bucket for each address, or for each /64 network of IPv6, which one host may have. For one thread.

    It allows ``burst`` events at once, and ``rate`` a second.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, and when they were counted; the latest last

    def allows(self, address: str) -> bool:
        """Count an event of an address, and return whether it is within the limit."""
        address = address.removeprefix("::ffff:")  # IPv4 at a socket of IPv6
        if ":" in address:
            address = str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
        now = time.monotonic()
        tokens, counted = self._buckets.pop(address, (self._burst, now))
        tokens = min(self._burst, tokens + (now - counted) * self._rate)
        allowed = tokens >= 1
        self._buckets[address] = tokens - allowed, now
        if len(self._buckets) > _MAX_ADDRESSES:
            del self._buckets[next(iter(self._buckets))]
        return allowed
