"""Segment made-up images with MONAI: its network, loss and metric, and DistributedDataParallel.

torchrun --nproc-per-node 2 examples/integrations/monai_unet.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from monai.data import CacheDataset, DataLoader, partition_dataset
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureTyped, RandFlipd
from monai.utils import evenly_divisible_all_gather, set_determinism
from task import SEED, parser, report
from torch.nn.parallel import DistributedDataParallel

options = parser().parse_args()
dist.init_process_group(options.backend)  # "rankmesh"
torch.set_num_threads(1)
set_determinism(SEED)
images = torch.rand(32, 1, 16, 16)
samples = [{"image": image, "label": (image > 0.5).float()} for image in images]
mine = partition_dataset(samples, num_partitions=dist.get_world_size())[dist.get_rank()]
flip = Compose([EnsureTyped(["image", "label"]), RandFlipd(["image", "label"], prob=0.5)])
loader = DataLoader(CacheDataset(mine, flip, progress=False), batch_size=4)
model = DistributedDataParallel(UNet(2, 1, 1, channels=(4, 8), strides=(2,), norm=("batch", {})))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(5):
    for batch in loader:
        optimizer.zero_grad()
        DiceLoss(sigmoid=True)(model(batch["image"]), batch["label"]).backward()
        optimizer.step()
model.eval()
dice = DiceMetric()
with torch.no_grad():
    for sample in mine:
        dice(model(sample["image"][None]).sigmoid() > 0.5, sample["label"][None])
scores = evenly_divisible_all_gather(dice.get_buffer())
report(model.module, 1 - scores.mean().item())
dist.destroy_process_group()
