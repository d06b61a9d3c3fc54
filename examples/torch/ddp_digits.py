"""Train the tutorial's network on handwritten digits with torch's DistributedDataParallel, over the mesh.

    torchrun --nproc-per-node=2 examples/torch/ddp_digits.py
    rankmesh run --nproc-per-node=2 examples/torch/ddp_digits.py
    python examples/torch/ddp_digits.py --spawn 2           # torch.multiprocessing.spawn
    rankmesh run --nproc-per-node=2 --max-restarts=3 examples/torch/ddp_digits.py --checkpoint out/ddp

It is a program for torch.distributed as any other: the backend's name is all that is RankMesh's. With
``--backend gloo`` two ranks print the very same losses.

With ``--checkpoint`` the ranks save the state after each epoch, by torch.distributed.checkpoint. If a rank dies, the
launcher starts all of them again (``--max-restarts``), and they go on after the last epoch that is complete, to the
very same parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from digits import Net, load, main, report, train
from epoch_checkpoints import EpochCheckpoints
from torch.nn.parallel import DistributedDataParallel


def run(options: argparse.Namespace) -> None:
    """Train as a rank."""
    training, test = load()
    model = DistributedDataParallel(Net())
    checkpoints = EpochCheckpoints(Path(options.checkpoint)) if options.checkpoint else None
    train(model, training, options, checkpoints=checkpoints)
    report(model.module, model.module.state_dict(), test)
    if checkpoints is not None:
        checkpoints.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the tutorial's network on handwritten digits with DDP.")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save the state here after each epoch")
    main(run, parser)
