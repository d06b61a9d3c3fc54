"""Settings, and meetings that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankmesh._rendezvous.locator import GatewayLocator
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.gateway_client import gateway_health

Open = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes a locator: ``opened(FileLocator, path, settings)``; all are closed at the end."""
    meetings: list[GatewayLocator] = []

    def make(kind: type[GatewayLocator], *arguments: Any) -> GatewayLocator:
        meetings.append(kind(*arguments))
        return meetings[-1]

    yield make
    for locator in meetings:
        locator.close()


@pytest.fixture
def settings() -> Settings:
    return Settings(job="job")


@pytest.fixture
def answers() -> Callable[[str], bool]:
    """Whether a gateway answers at a URL."""
    return lambda url: gateway_health(url, timeout=20) is not None
