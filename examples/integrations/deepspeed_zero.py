"""Train with DeepSpeed: gradients and the optimizer's state sharded (ZeRO stage 2).

DS_ACCELERATOR=cpu rankmesh run --nproc-per-node 2 examples/integrations/deepspeed_zero.py
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from task import BATCH, EPOCHS, RATE, dataset, network, parser, report
from torch.nn.functional import mse_loss

options = parser().parse_args()
deepspeed.init_distributed(dist_backend=options.backend)  # "rankmesh"
model = network()
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
    training_data=dataset(),
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
for epoch in range(EPOCHS):
    loader.data_sampler.set_epoch(epoch)
    for inputs, targets in loader:
        engine.backward(mse_loss(engine(inputs), targets))
        engine.step()
report(engine.module)
dist.destroy_process_group()
