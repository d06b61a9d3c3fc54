"""Train with ignite, which knows torch's own backends alone.

RANKMESH_AS=gloo torchrun --nproc-per-node 2 examples/integrations/ignite_engine.py
"""

from __future__ import annotations

import ignite.distributed as idist
import torch
from ignite.engine import create_supervised_trainer
from task import BATCH, EPOCHS, RATE, dataset, network, report
from torch.nn.functional import mse_loss


def train(local_rank: int) -> None:
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    loader = idist.auto_dataloader(dataset(), batch_size=BATCH * idist.get_world_size(), shuffle=True)
    trainer = create_supervised_trainer(model, optimizer, mse_loss)
    trainer.run(loader, max_epochs=EPOCHS)
    report(model.module)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)
