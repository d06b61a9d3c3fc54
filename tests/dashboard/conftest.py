"""A browser for all tests, a gateway's double, and pages that must not complain."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser
from support.browser import NoBrowserError, Visit, chromium
from support.gateway_double import Double

UNREACHABLE = "Failed to load resource"
"""What Chromium writes, by itself, of an answer that is an error, or does not come."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        with chromium() as found:
            yield found
    except NoBrowserError as error:
        if os.environ.get("RANKMESH_REQUIRE_BROWSER") == "1":
            raise
        pytest.skip(f"no browser: {error}")


@pytest.fixture
def double() -> Iterator[Double]:
    with Double() as running:
        yield running


@pytest.fixture
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Visit]]:
    """Opens pages. At the end none may have asked anybody else for anything, or have complained.

    A test that makes the gateway refuse or go is marked with ``unreachable``: then Chromium complains, not the page.
    """
    visits: list[Visit] = []

    def begin(url: str, **options: Any) -> Visit:
        visits.append(Visit(browser, url, **options))
        return visits[-1]

    yield begin
    for each in visits:
        each.end()
    allowed = request.node.get_closest_marker("unreachable") is not None
    complaints = [text for each in visits for text in each.complaints if not (allowed and UNREACHABLE in text)]
    assert not complaints
    assert not [url for each in visits for url in each.elsewhere]
