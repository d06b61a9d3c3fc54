"""Train with sharded parameters: torch's FSDP2.

rankmesh run --nproc-per-node 2 examples/integrations/fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from task import BATCH, EPOCHS, RATE, dataset, network, parser, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

options = parser().parse_args()
dist.init_process_group(options.backend)  # "rankmesh"
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(network(), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
sampler = DistributedSampler(dataset())
loader = DataLoader(dataset(), BATCH, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
report(model)
dist.destroy_process_group()
