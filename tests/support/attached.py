"""Gateways, and processes attached to standalone agents, played by threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.remote.agent import RemoteAgent
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.wire.hello import Service
from rankmesh_agent.wire.schemas import AgentHeartbeat, LeaseTerms
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry

TOKEN = "a5" * 32
SECONDS = 30.0


def offer(agent: Standalone, *, nearby: bool = True) -> AgentHeartbeat:
    """Return an agent as the gateway would offer it; if not nearby, as one of another host."""
    host_id = agent.host_id if nearby else "another host"
    return AgentHeartbeat(agent.id, agent.name, "here", host_id, os.getpid(), list(agent.urls))


@contextmanager
def gateway(registry: Registry) -> Iterator[str]:
    """Serve a gateway in this process; yields its URL."""
    listener = bind("127.0.0.1", 0, purpose="the test serves HTTP")
    server = HttpServer(listener, "gateway", token=TOKEN)
    stores = JobStores(registry, TOKEN)
    store_server = StoreServer(stores, TOKEN, "gateway-store")
    server.start(lambda: create_app(registry, token=TOKEN, stores=stores), {Service.STORE: store_server})
    yield url_of(listener)
    registry.close()
    server.close()


def in_thread(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="of the test", daemon=True).start()
    return future


def attach(
    agent: Standalone, rank: int, size: int, *, job: str, nearby: bool = True, token: str = TOKEN, **options: Any
) -> RemoteAgent:
    """Attach a process to an agent, or to another ``offer``, with another ``timeout``."""
    chosen, timeout = options.get("offer") or offer(agent, nearby=nearby), options.get("timeout", SECONDS)
    settings, deadline = Settings(token=token, job=job), Deadline(timeout)
    return RemoteAgent(settings, chosen, LeaseTerms(job, rank, size, timeout, holder=""), deadline)


def everywhere(call: Callable[[int], Any], size: int) -> list[Any]:
    """Make a call for each rank at once, in a thread each; return the results."""
    futures = [in_thread(lambda rank=rank: call(rank)) for rank in range(size)]
    return [future.result(2 * SECONDS) for future in futures]
