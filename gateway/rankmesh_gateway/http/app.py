"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import Iterable

from rankmesh_agent.http.construction import making
from rankmesh_agent.http.middleware import Application, Guard
from rankmesh_gateway import dashboard
from rankmesh_gateway.http.asgi import Front
from rankmesh_gateway.state.registry import Registry

MAX_BODY_BYTES = 8 << 20
"""Largest request body: a heartbeat that lists the ranks of several groups of a large world."""


def create_app(registry: Registry | None = None, *, token: str = "", names: Iterable[str] = ()) -> Guard:
    """Return the gateway's ASGI application.

    Args:
        registry: what it serves; a new one when left out.
        token: the secret that everything asks for but health and the dashboard's page, which holds no data; empty for
            none.
        names: host names besides addresses and localhost under which it may be asked.
    """
    served = Registry() if registry is None else registry

    def make_web() -> Application:
        with making():
            from rankmesh_gateway.http.application import create_web

            return create_web(served, token)

    return Guard(Front(served, make_web), token, names, MAX_BODY_BYTES, open_paths=dashboard.paths())
