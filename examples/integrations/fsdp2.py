"""Train with sharded parameters: torch's FSDP2.

rankmesh run --nproc-per-node 2 examples/integrations/fsdp2.py
"""

from __future__ import annotations

import torch.distributed as dist
from task import network, parser, report, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

options = parser().parse_args()
dist.init_process_group(options.backend)  # "rankmesh"
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(network(), mesh=mesh)
train(model)
report(model)
dist.destroy_process_group()
