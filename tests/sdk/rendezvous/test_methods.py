"""Which locator an init method means, and where rank and world size come from. test_join_errors has what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.processes import free_port

from rankmesh._rendezvous import Rendezvous, resolve_init_method
from rankmesh._session.init import _counting
from rankmesh_agent.config.launched import recorded
from rankmesh_agent.config.settings import Settings


@pytest.fixture
def meet() -> Iterator[Callable[..., Rendezvous]]:
    made: list[Rendezvous] = []

    def make(method: str | None, rank: int = -1, world_size: int = -1, **options: Any) -> Rendezvous:
        settings = options.pop("settings", None) or Settings(bind="127.0.0.1")
        made.append(resolve_init_method(method, rank, world_size, settings, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


LOOPBACK = {"bind": "127.0.0.1"}


@pytest.mark.parametrize(
    ("method", "given", "variables", "expected"),
    [
        ("tcp://127.0.0.1:{port}", (1, 3), {"rank": 2, "world_size": 9}, (1, 3)),
        ("tcp://127.0.0.1:{port}?rank=1&world_size=3", (-1, -1), {"rank": 2, "world_size": 9}, (1, 3)),
        ("tcp://127.0.0.1:{port}", (-1, -1), {"rank": 2, "world_size": 9}, (2, 9)),
        ("tcp://127.0.0.1:{port}", (-1, 3), {}, (-1, 3)),
        ("tcp://239.1.1.1:{port}?world_size=3", (-1, -1), {}, (-1, 3)),
        ("file:///{folder}/meet", (-1, 3), {}, (-1, 3)),
        ("http://127.0.0.1:{port}?rank=-1", (-1, 3), {}, (-1, 3)),
    ],
)
def test_rank_and_world_size(meet, tmp_path, method, given, variables, expected):
    method = method.format(port=free_port(), folder=tmp_path)
    met = meet(method, *given, settings=Settings(**LOOPBACK, **variables))
    assert (met.rank, met.world_size) == expected


@pytest.mark.parametrize("gateway", ["http://127.0.0.1:8700", None])
def test_the_environment_has_to_say_the_rank(meet, gateway):
    settings = Settings(gateway=gateway, master_addr="127.0.0.1", master_port=1, world_size=2)
    with pytest.raises(ValueError, match="set RANK"):
        meet(None, settings=settings)


def test_minus_one_in_the_url_says_nothing(meet):
    with pytest.raises(ValueError, match="set RANK"):
        meet("env://?rank=-1", world_size=2)


def test_a_gateway_in_the_environment(meet):
    met = meet("env://", 1, 2, settings=Settings(gateway="http://127.0.0.1:8700"))
    assert met.find() == "http://127.0.0.1:8700"


@pytest.mark.parametrize(
    ("method", "rank", "counts"),
    [
        (None, -1, True),
        ("env://", 1, True),
        ("tcp://127.0.0.1:29500", 1, True),  # the launcher's gateway
        ("http://localhost:29500", 1, True),
        ("tcp://127.0.0.1:29501", -1, True),  # the launcher's ranks, at an address of their own
        ("tcp://127.0.0.1:29501", 0, False),
        ("http://127.0.0.1:29501", 0, False),
        ("file:///tmp/there", 0, False),
        ("file:///tmp/there?rank=0&world_size=2", -1, False),
        ("file:///tmp/there", -1, True),
        ("tcp://127.0.0.1:wrong", 0, False),
    ],
)
def test_a_job_that_the_caller_describes_is_not_the_launchers(monkeypatch, method, rank, counts):
    made = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANKMESH_GATEWAY": "http://127.0.0.1:29500"}
    made |= {"RANK": "1", "RANKMESH_JOIN": "1", "RANKMESH_JOB": "job"}
    for name, value in recorded(made).items():
        monkeypatch.setenv(name, value)
    found = _counting(method, rank, -1 if rank < 0 else 2, None)
    assert (found.get("RANKMESH_JOIN") == "1", found["RANKMESH_JOB"]) == (counts, "job")
    assert "RANKMESH_JOIN" not in _counting(None, 1, 2, object())
