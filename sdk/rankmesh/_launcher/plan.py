"""The job to launch: who its ranks are and what their environment says."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from rankmesh._launcher.arguments import Options
from rankmesh_agent.config.launchers import slug
from rankmesh_agent.config.settings import Settings


@dataclass(frozen=True)
class Plan:
    """A job, as seen from one of its nodes.

    Attributes:
        options: what the command line says.
        job: the job's id, the same on all nodes.
        token: the secret its processes share.
        port: where the gateway listens; 0 until it does, when the command line leaves it open.
    """

    options: Options
    job: str
    token: str
    port: int

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.options.node_rank * self.options.nproc
        return range(first, first + self.options.nproc)

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        host = self.options.master_addr
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def owns_job(self) -> bool:
        """Whether no other launcher takes part in this job."""
        return self.options.nnodes == 1

    def command(self, rank: int) -> tuple[str, ...]:
        """Return what a rank executes."""
        options = self.options
        local = () if options.use_env else (f"--local-rank={rank - self.ranks.start}",)
        return (*options.program, *local, *options.arguments)

    def environment(self, rank: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a rank: ``base``, and what tells it who it is."""
        options = self.options
        world_size = str(options.nproc * options.nnodes)
        environment = {
            **base,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks.start),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(options.nproc),
            "GROUP_RANK": str(options.node_rank),
            "GROUP_WORLD_SIZE": str(options.nnodes),
            "ROLE_NAME": options.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": world_size,
            "TORCHELASTIC_RUN_ID": self.job,  # what programs look at to learn whether a launcher started them
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_ADDR": options.master_addr,
            "MASTER_PORT": str(self.port),
            "RANKMESH_GATEWAY": self.url,
            "RANKMESH_JOB": self.job,
            "RANKMESH_TOKEN": self.token,
            # Otherwise a rank's last words sit in its buffer while it hangs, and are lost when it is killed.
            "PYTHONUNBUFFERED": "1",
        }
        if options.local_addr:
            environment["RANKMESH_BIND"] = options.local_addr
        if options.nproc > 1:
            # Each rank's BLAS would take all cores: N ranks would run N times as many threads as there are cores.
            environment.setdefault("OMP_NUM_THREADS", "1")
        return environment


def plan(options: Options, settings: Settings) -> Plan:
    """Return the plan for a job: one of its own on one node, one that all nodes agree on by themselves on several.

    Raises:
        ValueError: there are several nodes and no token.
    """
    if options.nnodes == 1:
        name = options.job or options.name.removesuffix(".py")
        job = f"{slug(name)[:40]}-{secrets.token_hex(4)}"
        return Plan(options, job, token_of(settings), options.master_port)
    if not settings.token:
        raise ValueError(
            "a job on several nodes needs a token: set RANKMESH_TOKEN to the same secret on every node, for example "
            "the output of 'openssl rand -hex 32'"
        )
    job = options.job or settings.job
    if job == Settings.job:
        job = f"{options.master_addr}-{options.master_port}"
    return Plan(options, slug(job), settings.token, options.master_port)


def token_of(settings: Settings) -> str:
    """Return the secret of a job whose processes are all started here: the one that is set, or a fresh one."""
    return settings.token or secrets.token_hex(32)


def hand_token(token: str, environ: MutableMapping[str, str]) -> None:
    """Put a job's secret into the environment of a process that belongs to it."""
    environ["RANKMESH_TOKEN"] = token
