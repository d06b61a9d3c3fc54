"""Train with torch's DistributedDataParallel.

torchrun --nproc-per-node 2 examples/integrations/ddp.py
"""

from __future__ import annotations

import torch.distributed as dist
from task import network, parser, report, train
from torch.nn.parallel import DistributedDataParallel

options = parser().parse_args()
dist.init_process_group(options.backend)  # "rankmesh"
model = DistributedDataParallel(network())
train(model)
report(model.module)
dist.destroy_process_group()
