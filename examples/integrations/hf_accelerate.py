"""Train with Hugging Face accelerate, which knows torch's own backends alone.

RANKMESH_AS=gloo torchrun --nproc-per-node 2 examples/integrations/hf_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from task import BATCH, EPOCHS, RATE, dataset, network, report
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset(), BATCH, shuffle=True))
for _ in range(EPOCHS):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
report(accelerator.unwrap_model(model))
accelerator.end_training()
