"""A plugin of pytest and coverage.py for tools/mutate.py: which test runs a line, for how long, and which tests run.

What a process that a test starts runs counts as that test's, whose name is in the process's environment.
"""

from __future__ import annotations

import collections
import json
import os
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from coverage import Coverage, CoveragePlugin

_TEST, _CHOSEN, _SECONDS = "PYTEST_CURRENT_TEST", "MUTATE_TESTS", "MUTATE_SECONDS"  # pytest's, and ours: paths of files
_seconds: collections.Counter[str] = collections.Counter()
_failed: set[str] = set()


class _Contexts(CoveragePlugin):
    def dynamic_context(self, frame: FrameType) -> str | None:
        if threading.current_thread() is not threading.main_thread():
            return None  # its end would be that of the main thread's context
        return os.environ.get(_TEST, "").rpartition(" ")[0] or None


def coverage_init(registry: Any, _options: object) -> None:
    """Name the test in a process that it starts."""
    if _TEST in os.environ:
        registry.add_dynamic_context(_Contexts())


def pytest_configure() -> None:
    """Spare hypothesis the smallest example that fails."""
    from hypothesis import Phase, settings

    settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("no shrinking")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the chosen tests, in their order."""
    if path := os.environ.get(_CHOSEN):
        places = {name: place for place, name in enumerate(Path(path).read_text().splitlines())}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
        items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test from here on."""
    if running := Coverage.current():
        running.switch_context(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Add up a test's seconds."""
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: Any) -> None:
    """Write the seconds of the tests that passed beside those of earlier runs."""
    if _SECONDS in os.environ and not hasattr(session.config, "workerinput"):
        path = Path(os.environ[_SECONDS])
        known = json.loads(path.read_text()) if path.exists() else {}
        known |= {test: round(took, 3) for test, took in _seconds.items() if test not in _failed}
        path.write_text(json.dumps(known))
