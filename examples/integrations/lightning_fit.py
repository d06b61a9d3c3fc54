"""Train with Lightning, which starts the processes.

python examples/integrations/lightning_fit.py
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from task import BATCH, EPOCHS, RATE, dataset, network, parser, report
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = mse_loss(self.network(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    def on_train_end(self) -> None:
        report(self.network)


options = parser().parse_args()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=options.backend),  # "rankmesh"
    max_epochs=EPOCHS,
    **dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False),
)
trainer.fit(Regression(), DataLoader(dataset(), BATCH, shuffle=True))
