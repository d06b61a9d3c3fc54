"""The job to launch: its ranks, their commands and their environment."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rankmesh._launcher.arguments import AUTO, Options
from rankmesh_agent.config.launched import unlaunched
from rankmesh_agent.config.launchers import slug
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.sockets import url_for
from rankmesh_agent.wire.credentials import job_of
from rankmesh_agent.wire.schemas import STARTING, LauncherHeartbeat


@dataclass(frozen=True)
class Plan:
    """A job, from the point of view of one node.

    Attributes:
        job: the job's id, equal on all nodes.
        port: the gateway's port; 0 until it listens, if the command line does not set one.
        restarts: how often that was after a failure, and not only because a node joined.
    """

    options: Options
    job: str
    token: str
    port: int
    node: int
    nodes: int
    attempt: int = 0
    restarts: int = 0

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.node * self.options.nproc
        return range(first, first + self.options.nproc)

    @property
    def world_size(self) -> int:
        """The ranks of the job."""
        return self.options.nproc * self.nodes

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return url_for(self.options.master_addr, self.port)

    @property
    def owns_job(self) -> bool:
        """True if this launcher starts all ranks of the job."""
        return self.options.nnodes == 1

    def command(self, rank: int) -> tuple[str, ...]:
        """Return the command line of a rank."""
        options = self.options
        local = () if options.use_env else (f"--local-rank={rank - self.ranks.start}",)
        return (*options.program, *local, *options.arguments)

    def heartbeat(self, *, hosts_gateway: bool) -> LauncherHeartbeat:
        """Return this node's first heartbeat; ``hosts_gateway``: whether the gateway is in this process."""
        options = self.options
        return LauncherHeartbeat(
            self.job,
            options.node_rank,
            options.nnodes,
            "",
            STARTING,
            "waiting",
            options.max_restarts,
            min_nodes=options.min_nodes,
            nproc=options.nproc,
            last_call=options.join_window,
            hosts_gateway=hosts_gateway,
        )

    def environment(self, rank: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a rank: ``base`` and the variables of the job."""
        options = self.options
        world_size = str(self.world_size)
        environment = {
            **{name: value for name, value in unlaunched(base).items() if name not in options.variables},
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks.start),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(options.nproc),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_NAME": options.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": world_size,
            "TORCHELASTIC_RUN_ID": self.job,  # programs detect a launcher by it
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's store is the gateway's, at MASTER_PORT
            "MASTER_ADDR": options.master_addr,
            "MASTER_PORT": str(self.port),
            "RANKMESH_GATEWAY": self.url,
            "RANKMESH_JOB": self.job,
            "RANKMESH_ATTEMPT": str(self.attempt),
            "RANKMESH_TOKEN": self.token,
            # Otherwise a rank's last output stays in its buffer while it hangs, and is lost when it is killed.
            "PYTHONUNBUFFERED": "1",
        }
        if options.local_addr:
            environment["RANKMESH_BIND"] = options.local_addr
        if options.as_gloo:
            environment["RANKMESH_AS"] = "gloo"
        if options.pdb is not None:
            environment.setdefault("RANKMESH_TIMEOUT", "86400")
            environment["RANKMESH_PDB"] = str(int(rank == options.pdb))
        if options.nproc > 1:
            # Each rank's BLAS would take all cores: N ranks would run N times as many threads as there are cores.
            environment.setdefault("OMP_NUM_THREADS", "1")
        return environment


def plan(options: Options, settings: Settings) -> Plan:
    """Return the plan of a job; one without a name has a random name on one node, else one that all nodes derive."""
    place = options.master_port, max(0, options.node_rank), options.nnodes
    held = job_of(settings.token)
    if held is not None:
        if options.job not in ("", held):
            raise ValueError(
                f"RANKMESH_TOKEN is the credential of job {held!r}, and --rdzv-id names job {options.job!r}: leave "
                "it out"
            )
        return Plan(options, held, settings.token, *place)
    job = options.job or settings.job
    if options.nnodes == 1:
        if job == Settings.job:
            job = f"{options.name.removesuffix('.py')[:40]}-{secrets.token_hex(4)}"
        return Plan(options, slug(job), settings.token or secrets.token_hex(32), *place)
    if not settings.token:
        raise ValueError(
            "a job on several nodes needs a token: set RANKMESH_TOKEN to the same secret on every node, for example "
            "the output of 'openssl rand -hex 32'"
        )
    if job == Settings.job:
        if options.external_gateway:
            raise ValueError("the gateway may serve other jobs, too: name this one with --rdzv-id, alike on all nodes")
        job = f"{options.master_addr}-{options.master_port}"
    return Plan(options, slug(job), settings.token, *place)


def resolve_nodes(options: Options, settings: Settings) -> Options:
    """Return the options with the nodes of the environment, if the command line has ``--nnodes auto``."""
    if options.nnodes != AUTO:
        return options
    launcher = settings.launcher
    if launcher is None:
        raise ValueError(
            "--nnodes auto: neither srun, mpirun, mpiexec nor an Indexed Job of Kubernetes started this launcher; give "
            "--nnodes, --node-rank and --master-addr"
        )
    if launcher.rank is None or launcher.world_size is None:  # else WORLD_SIZE may be of ranks, and is not compared
        raise ValueError(f"--nnodes auto: {launcher.problem}")
    if launcher.world_size == 1:
        return replace(options, nnodes=1, min_nodes=1)
    from rankmesh._rendezvous.locator import with_master_address

    there = with_master_address(settings, launcher)
    return replace(
        options,
        nnodes=launcher.world_size,
        min_nodes=launcher.world_size,
        node_rank=launcher.rank,
        master_addr=there.master_addr or options.master_addr,
        master_port=options.master_port or there.master_port or 0,
        local_addr=options.local_addr or there.bind or "",
        job=options.job or (launcher.job() if not settings.names_job else ""),
    )
