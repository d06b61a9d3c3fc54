"""A headless Chromium, and pages in it that tell what no page of ours may do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Route, TimeoutError, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_BLANK_LINES = re.compile("\n+")
WAIT_MS = 60_000.0
"""How long a page is given to show what it is to show."""


class NoBrowserError(Exception):
    """There is no Chromium on this machine."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium, as the system has it or else as playwright has installed it.

    Raises:
        NoBrowserError: neither has.
    """
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = next(filter(None, map(shutil.which, NAMES)), own if os.path.exists(own) else None)
        if path is None:
            raise NoBrowserError(
                f"none of {', '.join(NAMES)} is in PATH: install one, for example with 'apt-get install chromium', or "
                "run 'playwright install chromium'"
            )
        # Chromium's sandbox refuses to work for root, and containers seldom let it.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page of a gateway.

    Args:
        browser: in which.
        url: of the gateway.
        options: of the browser's context: ``viewport``, ``color_scheme``, and so on.

    Attributes:
        page: playwright's page.
        complaints: what the browser or the page wrote on the console as a warning or an error.
        elsewhere: requests to other places than the gateway; they are not let through.
    """

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self._context = browser.new_context(**options)
        self._context.set_default_timeout(WAIT_MS)
        self._context.route("**/*", self._route)
        self.page: Page = self._context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.goto(url)

    def end(self) -> None:
        """Leave."""
        self._context.close()

    def text(self, selector: str) -> str:
        """What an element says."""
        return self.page.locator(selector).inner_text()

    def rows(self, selector: str) -> list[list[str]]:
        """The texts of the visible cells of a table's rows."""
        return [
            [_BLANK_LINES.sub("\n", cell.strip()) for cell in row.locator("th:visible, td:visible").all_inner_texts()]
            for row in self.page.locator(f"{selector} tbody tr").all()
        ]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition()`` is true. The browser's requests pass through this thread, so it must not sleep."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not condition():
            assert time.monotonic() < deadline, f"waited {WAIT_MS / 1000:g} s for {what}"
            self.page.wait_for_timeout(20)

    def wait_for_text(self, selector: str, text: str) -> None:
        """Wait until an element, or one of several, contains a text."""
        try:
            self.page.locator(selector, has_text=text).first.wait_for()
        except TimeoutError as error:
            shown = self.page.locator("body").inner_text()
            raise AssertionError(f"{text!r} is not in {selector}: {self.complaints}\n{shown}") from error

    def _route(self, route: Route) -> None:
        if urlsplit(route.request.url).netloc == urlsplit(self.url).netloc:
            route.continue_()
        else:
            self.elsewhere.append(route.request.url)
            route.abort()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("warning", "error"):
            self.complaints.append(message.text)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()
