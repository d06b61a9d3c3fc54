"""Properties of imports that import-linter's contracts in pyproject.toml cannot express."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for package in ("agent", "gateway", "sdk") for path in (ROOT / package).rglob("*.py"))

AGENT = "import sys, rankmesh, rankmesh_agent.agent; rankmesh.all_reduce"
SDK = "import sys, rankmesh; rankmesh.all_reduce"
COMMAND = "import sys, rankmesh.cli"
LAUNCHER = "import sys, rankmesh.launch, rankmesh_gateway.server"


def looks_up_a_variable(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "getenv":
        return True
    return (
        isinstance(node, ast.Subscript | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "environ"
    )


def test_only_config_reads_environment_variables() -> None:
    """Other modules pass ``os.environ`` to Settings.from_env, or to processes they start; none looks a name up."""
    lookups = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if looks_up_a_variable(node)
    ]
    assert not lookups


@pytest.mark.parametrize(
    ("statements", "absent"),
    [
        pytest.param(SDK, "fastapi uvicorn cryptography torch cupy typer rich mpi4py prometheus_client", id="the SDK"),
        pytest.param(AGENT, "fastapi uvicorn cryptography asyncio prometheus_client", id="a rank's agent"),
        pytest.param(COMMAND, "numpy rich http.client asyncio fastapi cryptography rankmesh._face", id="the command"),
        pytest.param(LAUNCHER, "numpy typer pydantic fastapi sqlite3 rankmesh._face", id="the launcher"),
    ],
)
def test_an_import_loads_no_more_than_it_needs(statements: str, absent: str) -> None:
    code = f"{statements}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not set(absent.split()) & set(loaded.split())
