"""Settings, and meetings that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankmesh._rendezvous.locator import Meeting
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.gateway_client import gateway_id

Open = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes a meeting: ``opened(AtFile, path, settings)``; all are closed at the end."""
    meetings: list[Meeting] = []

    def make(kind: type[Meeting], *arguments: Any) -> Meeting:
        meetings.append(kind(*arguments))
        return meetings[-1]

    yield make
    for meeting in meetings:
        meeting.close()


@pytest.fixture
def settings() -> Settings:
    return Settings(job="job")


@pytest.fixture
def answers() -> Callable[[str], bool]:
    """Whether a gateway answers at a URL."""
    return lambda url: gateway_id(url, timeout=20) is not None
