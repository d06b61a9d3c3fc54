"""Imports point down, and the heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "rankmesh_agent": ROOT / "agent/rankmesh_agent",
    "rankmesh_gateway": ROOT / "gateway/rankmesh_gateway",
    "rankmesh": ROOT / "sdk/rankmesh",
}
MAY_IMPORT = {
    "rankmesh_agent.wire": {"wire"},
    "rankmesh_agent.transports": {"transports", "wire"},
    "rankmesh_agent.device": {"device", "wire"},
    "rankmesh_agent.collectives": {"collectives", "transports", "device", "wire"},
    "rankmesh_agent.store": {"store", "wire"},
    "rankmesh_agent.group": {"engine", "collectives", "store", "transports", "device", "wire"},
    "rankmesh_agent.remote": {"attach", "agent", "engine", "collectives", "store", "transports", "wire"},
    "rankmesh_agent.http.application": {"wire"},
    "rankmesh_agent.http.prometheus": set(),
    "rankmesh_agent.diagnostics.stacks": {"wire"},
    "rankmesh_agent.http.routes": {"routes", "web", "exposition", "stacks", "engine", "collectives", "store", "wire"},
}
"""Layers of the agent, from the ground up, and what each may import of the agent."""
FOR_THE_GATEWAY = ("rankmesh_agent.wire", "rankmesh_agent.http.application", "rankmesh_agent.http.prometheus")
"""What both services stand on."""

LIBRARIES = {
    "pydantic": {"rankmesh_agent.http.routes", "rankmesh_gateway.http.routes"},
    "fastapi": {
        "rankmesh_agent.http.app",
        "rankmesh_agent.http.application",
        "rankmesh_agent.http.routes",
        "rankmesh_gateway.http.routes",
    },
    "starlette": {"rankmesh_agent.http.application", "rankmesh_agent.http.routes", "rankmesh_gateway.http.routes"},
    "uvicorn": {"rankmesh_agent.http.server", "rankmesh_agent.http.uvicorn_server", "rankmesh_gateway.http.server"},
    "httpx": {"rankmesh_agent.store.http_client", "rankmesh_gateway.clients.agent_client"},
    "prometheus_client": {
        "rankmesh_agent.http.prometheus",
        "rankmesh_agent.http.routes.metrics",
        "rankmesh_gateway.http.routes",
    },
    "typer": {"rankmesh.cli", "rankmesh._cli"},
    "rich": {"rankmesh._cli"},
    "cupy": {"rankmesh_agent.device"},
}
"""Libraries that take long to load or tie to a framework, and the modules that may import them."""


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module or ""


def within(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


MODULES = list(modules())


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_point_down(name: str, path: Path) -> None:
    for imported in imports(path):
        if within(name, "rankmesh_agent"):
            assert not within(imported, "rankmesh", "rankmesh_gateway"), f"{name} imports {imported}"
        if within(name, "rankmesh_gateway"):
            assert not within(imported, "rankmesh"), f"{name} imports {imported}"
            if within(imported, "rankmesh_agent"):
                assert within(imported, *FOR_THE_GATEWAY), f"{name} imports {imported}"
        for layer, allowed in MAY_IMPORT.items():
            if within(name, layer) and within(imported, "rankmesh_agent"):
                assert within(imported, *(f"rankmesh_agent.{low}" for low in allowed)), f"{name} imports {imported}"


@pytest.mark.parametrize("name", [name for name, _ in MODULES if within(name, "rankmesh_agent.wire")])
def test_the_ground_floor_stands_on_the_standard_library_and_numpy(name: str) -> None:
    for imported in imports(dict(MODULES)[name]):
        top = imported.partition(".")[0]
        assert top in {*sys.stdlib_module_names, "numpy", "ml_dtypes", "rankmesh_agent"}, f"{name} imports {imported}"


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_libraries_stay_in_their_modules(name: str, path: Path) -> None:
    for imported in imports(path):
        allowed = LIBRARIES.get(imported.partition(".")[0])
        assert allowed is None or within(name, *allowed), f"{name} imports {imported}"


def test_only_settings_know_the_names_of_variables() -> None:
    """Others hand ``os.environ`` to Settings.from_env, or to processes they start; none looks a name up."""
    for name, path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            looked_up = (
                isinstance(node, ast.Subscript | ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "environ"
            ) or (isinstance(node, ast.Attribute) and node.attr == "getenv")
            assert not looked_up, f"{name} reads the environment in line {node.lineno}"


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    code = "import sys, rankmesh; rankmesh.all_reduce; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    heavy = {"fastapi", "uvicorn", "httpx", "torch", "cupy", "typer", "rich", "mpi4py", "prometheus_client"}
    assert not heavy & set(loaded.split())


def test_a_rank_is_made_without_what_only_some_are_asked_for() -> None:
    code = "import sys, rankmesh, rankmesh_agent.agent; rankmesh.all_reduce; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"fastapi", "uvicorn", "httpx", "asyncio", "prometheus_client"} & set(loaded.split())


def test_the_command_begins_without_what_only_some_commands_need() -> None:
    code = "import sys, rankmesh.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"numpy", "rich", "http.client", "asyncio", "fastapi", "httpx", "rankmesh._face"} & set(loaded.split())
