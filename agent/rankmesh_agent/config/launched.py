"""The environment that ``rankmesh run`` makes for a rank, and what of it counts in a process that inherits it.

RANKMESH_LAUNCHED has the variables as the launcher made them. A process that sets MASTER_ADDR, MASTER_PORT or
RANKMESH_GATEWAY anew belongs to another job: what else it inherited from the launcher does not count there. Nor does
it in the processes of an mpirun, mpiexec or srun that a rank has called.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from rankmesh_agent.config.addresses import resolves_to_loopback

VARIABLE = "RANKMESH_LAUNCHED"
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT", "RANKMESH_GATEWAY")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PLACE = (
    *("RANKMESH_GATEWAY", "RANKMESH_BIND", "RANKMESH_JOIN", "RANKMESH_FAILURE_FILE", "RANKMESH_PDB"),
    "TORCHELASTIC_RUN_ID",
)
"""Variables that count at the launcher's gateway alone."""
_TORCHRUN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")
"""Variables of a torchrun that has started the launcher, about its own store and report."""
_STARTED = ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMI_RANK", "SLURM_PROCID", "SLURM_STEP_ID")
"""Variables that a launcher of rankmesh_agent.config.launchers sets anew in each process."""
_JOB = ("RANKMESH_JOB", "RANKMESH_ATTEMPT")
"""Variables that count at other addresses as well: jobs that the ranks of two launchers start there have two names."""


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a launcher has made for a rank, with the record of it."""
    names = (*_RANK, *_ADDRESS, *_PLACE, *_JOB, *_STARTED)
    made = {name: environment[name] for name in names if name in environment}
    return {**environment, VARIABLE: json.dumps(made)}


def counting(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that count in this process: without the launcher's if it is of another job."""
    made = _record(environ)
    if any(environ.get(name, made.get(name)) != made.get(name) for name in _STARTED):
        return _without(environ, made, (*_RANK, *_ADDRESS, *_PLACE, *_JOB))
    if all(_is_same(name, environ.get(name), made.get(name)) for name in _ADDRESS):
        return environ
    return _without(environ, made, _PLACE)


def elsewhere(environ: Mapping[str, str], *, named: bool = False) -> Mapping[str, str]:
    """Return the variables that count in a job at another gateway; ``named``: it has the launcher's name there."""
    return _without(environ, _record(environ), _PLACE if named else (*_PLACE, *_JOB))


def unlaunched(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that count in a launcher of another job, and in its ranks."""
    inherited = _without(environ, _record(environ), (*_PLACE, *_JOB))
    return {name: value for name, value in inherited.items() if name not in (VARIABLE, *_TORCHRUN)}


def is_launchers(environ: Mapping[str, str], host: str, port: int) -> bool:
    """Return whether an address is that of the gateway of this process's launcher."""
    made = _record(environ)
    if not made:
        return False
    gateway = urlsplit(made.get("RANKMESH_GATEWAY", ""))
    return port == gateway.port and _is_same("MASTER_ADDR", host, gateway.hostname)


def has_store(environ: Mapping[str, str]) -> bool:
    """Return whether TORCHELASTIC_USE_AGENT_STORE is of ``rankmesh run``, and not of a torchrun, which has a run id."""
    run = _record(environ).get("TORCHELASTIC_RUN_ID")
    return run is not None and environ.get("TORCHELASTIC_RUN_ID", run) == run


def parent(environ: Mapping[str, str]) -> str:
    """Return job and rank of the launcher's process that this one is, or descends from; empty without a launcher."""
    made = _record(environ)
    return f"{made['RANKMESH_JOB']}/{made['RANK']}" if {"RANKMESH_JOB", "RANK"} <= made.keys() else ""


def _record(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        made = json.loads(environ.get(VARIABLE, "{}"))
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in made.items()} if isinstance(made, dict) else {}


def _is_same(name: str, value: str | None, made: str | None) -> bool:
    """Return whether a variable has not been set anew: it is missing, or has the launcher's value."""
    if not value or made is None or value == made:
        return True
    return name == "MASTER_ADDR" and resolves_to_loopback(value) and resolves_to_loopback(made)


def _without(environ: Mapping[str, str], made: Mapping[str, str], names: Iterable[str]) -> Mapping[str, str]:
    inherited = {name for name in names if name in made and environ.get(name) == made[name]}
    return {name: value for name, value in environ.items() if name not in inherited}
