"""Ranks as processes, a gateway, and a world of one rank in this process."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support import hosting, rank_server
from support.etcd import Etcd
from support.processes import Ranks, wait_until

import rankmesh as dist

# Under nohup, or in the background of a script, these come ignored, and so they would to all that the tests start.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


LONGEST = (
    "torch/test_ddp_restart.py",
    "torch/test_training.py",
    "torch/test_examples_torch.py",
    "torch/test_scripts.py",
    "torch/test_spawn_torch.py",
    "torch/test_membership.py",
    "torch/test_torchrun_gateway.py",
    "torch/test_torchrun.py",
    "torch/test_suite.py",
    "http/test_schemathesis.py",
    "examples/test_train_digits.py",
    "sdk/launcher/test_restart.py",
    "sdk/launcher/test_multiprocessing.py",
    "sdk/launcher/test_elastic_nodes.py",
    "sdk/launcher/test_processes.py",
    "sdk/test_meetings.py",
    "sdk/test_failures.py",
    "sdk/test_descriptor_limit.py",
    "sdk/session/test_shrink.py",
    "agent/collectives/test_sweep.py",
    "sdk/launcher/test_failure.py",
    "benchmarks/test_parts.py",
    "sdk/cli/test_diagnose.py",
    "sdk/launcher/test_replace.py",
    "sdk/test_join_errors.py",
    "sdk/test_http_ranks.py",
    "sdk/test_fork.py",
    "sdk/session/test_growth.py",
    "sdk/test_gateway_restart.py",
    "sdk/cli/test_cli_page.py",
    "sdk/cli/test_doctor.py",
    "sdk/test_killed_rank.py",
    "sdk/nn/test_bucketer.py",
    "agent/collectives/test_leaders.py",
    "sdk/cli/test_diagnose_dumps.py",
    "sdk/test_stores_tcp.py",
    "sdk/cli/test_store_command.py",
    "sdk/test_store_gateway.py",
)
"""The files that take longest: begun last, one of them would run on alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; `make test` gives the workers the files in the order of collection."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector never look at the tests themselves: there are thousands, and they stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """End the agents and rank servers that tests had started; a worker ends without calling what atexit has."""
    hosting.close_all()
    rank_server.close_all()


@pytest.fixture
def anyio_backend() -> str:
    """What asynchronous tests run on."""
    return "asyncio"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def gateway(ranks: Ranks) -> Iterator[str]:
    """The URL of a gateway in a process of its own."""
    process = ranks.command("-m", "rankmesh_gateway", "--port", "0", name="gateway")
    ready = r"ready at (http://\S+)\n"
    found = wait_until(lambda: re.search(ready, process.stdout), f"the gateway to be ready: {process!r}")
    yield found[1]
    process.process.terminate()
    assert process.process.wait(60) == 0, process


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is rank 0 of 1."""
    path = tmp_path_factory.mktemp("alone") / "rendezvous"
    if hosting.ATTACHED:
        job = f"alone-{os.getpid()}"
        dist.init_process_group(init_method=hosting.cluster({}, 1, "alone").url, rank=0, world_size=1, group_name=job)
    else:
        dist.init_process_group(init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """An etcd that all tests share; each has a prefix of its own."""
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()
