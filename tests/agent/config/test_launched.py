"""What counts of the environment that a launcher has made, in the processes that inherit it."""

from __future__ import annotations

import pytest

from rankmesh_agent.config import launched
from rankmesh_agent.config.settings import Settings

VARIABLES = (
    "RANK=1,WORLD_SIZE=2,LOCAL_RANK=1,MASTER_ADDR=127.0.0.1,MASTER_PORT=29500,TORCHELASTIC_RUN_ID=job,"
    "RANKMESH_GATEWAY=http://127.0.0.1:29500,RANKMESH_BIND=127.0.0.1,RANKMESH_JOB=job,RANKMESH_ATTEMPT=1,"
    "RANKMESH_JOIN=1,RANKMESH_FAILURE_FILE=/proc/1/fd/3,RANKMESH_TOKEN=the secret of all"
)
MADE = launched.recorded(dict(variable.split("=") for variable in VARIABLES.split(",")))
PLACE = ("gateway", "bind", "join", "failure_file", "elastic_run")


def counted(**anew: str | None) -> set[str]:
    """Return which settings of the launcher count with some variables set anew, or deleted."""
    given = MADE | anew
    read = Settings.from_env({name: value for name, value in given.items() if value is not None})
    before = Settings.from_env(MADE)
    names = (*PLACE, "rank", "job", "attempt", "token")
    return {name for name in names if getattr(read, name) == getattr(before, name)}


OTHERS = {"rank", "job", "attempt", "token"}


@pytest.mark.parametrize(
    ("anew", "counts"),
    [
        ({}, {*PLACE, *OTHERS}),
        ({"MASTER_PORT": "29501"}, OTHERS),
        ({"MASTER_ADDR": "10.0.0.1"}, OTHERS),
        ({"MASTER_ADDR": "localhost"}, {*PLACE, *OTHERS}),  # the same address
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, {*PLACE, *OTHERS}),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29501"}, OTHERS - {"rank"}),
        ({"RANKMESH_GATEWAY": "http://127.0.0.1:29501"}, OTHERS),
        ({"MASTER_PORT": "29501", "RANKMESH_JOIN": "0", "RANKMESH_BIND": "127.0.0.2"}, OTHERS),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "n"}, {"token"}),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, {"token"}),
        ({launched.VARIABLE: "no record"}, {*PLACE, *OTHERS}),
    ],
)
def test_what_is_set_anew_outranks_what_was_inherited(anew, counts):
    assert counted(**anew) == counts


def test_values_set_anew_count_beside_an_address_set_anew():
    read = Settings.from_env(
        MADE | {"MASTER_PORT": "29501", "RANKMESH_GATEWAY": "http://node7:1", "RANKMESH_JOB": "mine"}
    )
    assert (read.gateway, read.job, read.master_port) == ("http://node7:1", "mine", 29501)


def test_a_launcher_begins_without_the_variables_of_the_one_around_it():
    kept = launched.unlaunched(
        MADE | {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANKMESH_TIMEOUT": "7", "RANKMESH_JOB": "x"}
    )
    assert kept["RANKMESH_TIMEOUT"] == "7"
    ours = {name for name in kept if name.startswith("RANKMESH_")}
    assert ours == {"RANKMESH_TOKEN", "RANKMESH_TIMEOUT", "RANKMESH_JOB"}
    assert not any(name.startswith("TORCHELASTIC_") for name in kept)


@pytest.mark.parametrize(
    ("host", "port", "is_it"),
    [("127.0.0.1", 29500, True), ("LOCALHOST", 29500, True), ("127.0.0.1", 29501, False), ("10.0.0.1", 29500, False)],
)
def test_the_address_of_the_launchers_gateway(host, port, is_it):
    assert launched.is_launchers(MADE, host, port) is is_it
    assert not launched.is_launchers({}, host, port)


def test_without_a_launcher_everything_counts():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "RANKMESH_GATEWAY": "http://node7:1"}
    assert launched.counting(environ) == environ
    assert launched.elsewhere(environ) == environ
    assert launched.unlaunched(environ) == environ
