"""Environment variables of one value, with errors that name the variable."""

from __future__ import annotations

from collections.abc import Mapping


def integer(environ: Mapping[str, str], *names: str, at_least: int = 0, at_most: int | None = None) -> int | None:
    """Return the number in the first variable that is set, None if none is.

    Raises:
        ValueError: the value is no whole number, or out of range; the message names the variable.
    """
    for name in names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is not a whole number") from None
        if value < at_least or (at_most is not None and value > at_most):
            upper = "" if at_most is None else f" and at most {at_most}"
            raise ValueError(f"{name}={value} is out of range: it must be at least {at_least}{upper}")
        return value
    return None


def describe_set(environ: Mapping[str, str], *names: str) -> str:
    """Return the variables that are set, as text: ``SLURM_PROCID=3, SLURM_NTASKS=4``."""
    return ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


def replaces_gloo(environ: Mapping[str, str]) -> bool:
    """Return whether torch's backend gloo is to be RankMesh: RANKMESH_AS=gloo."""
    name = environ.get("RANKMESH_AS", "")
    if name not in ("", "gloo"):
        raise ValueError(f"RANKMESH_AS={name!r} is not a backend of torch that RankMesh can replace: only gloo is")
    return bool(name)


def shares_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether NCCL may have several ranks on one GPU: NCCL_MULTI_RANK_GPU_ENABLE=1."""
    return environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def permits_native(environ: Mapping[str, str]) -> bool:
    """Return whether the compiled core may be used: RANKMESH_NATIVE is 1, as by default, and not 0."""
    return integer(environ, "RANKMESH_NATIVE", at_most=1) != 0


def forbids_colour(environ: Mapping[str, str]) -> bool:
    """Return whether output is to have no colours: NO_COLOR has a value, see no-color.org."""
    return bool(environ.get("NO_COLOR"))
