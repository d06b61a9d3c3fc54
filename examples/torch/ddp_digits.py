"""Train the tutorial's network on handwritten digits with torch's DistributedDataParallel, over the mesh.

    torchrun --nproc-per-node=2 examples/torch/ddp_digits.py
    rankmesh run --nproc-per-node=2 examples/torch/ddp_digits.py
    python examples/torch/ddp_digits.py --spawn 2           # torch.multiprocessing.spawn

It is a program for torch.distributed as any other: the backend's name is all that is RankMesh's. With
``--backend gloo`` two ranks print the very same losses.
"""

from __future__ import annotations

import argparse

from digits import Net, load, main, report, train
from torch.nn.parallel import DistributedDataParallel


def run(options: argparse.Namespace) -> None:
    """Train as a rank."""
    training, test = load()
    model = DistributedDataParallel(Net())
    train(model, training, options)
    report(model.module, model.module.state_dict(), test)


if __name__ == "__main__":
    main(run, argparse.ArgumentParser(description="Train the tutorial's network on handwritten digits with DDP."))
