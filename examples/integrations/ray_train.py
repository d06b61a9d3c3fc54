"""Train with Ray Train: ranks on the workers of a Ray cluster, here one that the program starts.

python examples/integrations/ray_train.py
"""

from __future__ import annotations

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from task import BATCH, EPOCHS, RATE, dataset, network, parser, summary
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


def train() -> str:
    """Train as a rank."""
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(dataset(), BATCH, shuffle=True))
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return summary(model.module)


if __name__ == "__main__":
    options = parser().parse_args()
    ray.init(num_cpus=3, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(backend=options.backend),  # "rankmesh"
        scaling_config=ScalingConfig(num_workers=2),
    )
    print(trainer.fit().return_value)
