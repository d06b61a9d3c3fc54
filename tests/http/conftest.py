"""Names for the tests that schemathesis makes, one an operation: it leaves all with the same one, and xdist runs one."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        nodeid = item.nodeid
        seen[nodeid] += 1
        if seen[nodeid] > 1 or getattr(item, "operation_label", None):
            label = getattr(item, "operation_label", None) or seen[nodeid]
            item.name, item._nodeid = f"{item.name}[{label}]", f"{nodeid}[{label}]"
