"""Names for the tests that schemathesis makes: pytest 9.2 gives them all the same id, of which xdist would run one."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        label = getattr(item, "operation_label", None)
        if label is not None and not item.nodeid.endswith("]"):
            from _pytest.nodeid import coerce_node_id

            item._id = coerce_node_id(f"{item.nodeid}[{label}]")
