"""``--nnodes auto``: the nodes are those on which Slurm, mpirun or Kubernetes started a launcher."""

from __future__ import annotations

from dataclasses import replace

from rankmesh._launcher.arguments import AUTO, Options
from rankmesh_agent.config.settings import Settings


def resolve_nodes(options: Options, settings: Settings) -> Options:
    """Return the options with the nodes of the environment, if the command line has ``--nnodes auto``.

    Raises:
        ValueError: the environment does not define the nodes, or a setting for several nodes is missing.
        DistNetworkError: node 0 has no route.
    """
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
    from rankmesh._rendezvous.launcher_env import with_master_address

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
