"""Train with torch's DistributedDataParallel.

torchrun --nproc-per-node 2 examples/integrations/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from task import BATCH, EPOCHS, RATE, dataset, network, parser, report
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

options = parser().parse_args()
dist.init_process_group(options.backend)  # "rankmesh"
model = DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
sampler = DistributedSampler(dataset())
loader = DataLoader(dataset(), BATCH, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
report(model.module)
dist.destroy_process_group()
