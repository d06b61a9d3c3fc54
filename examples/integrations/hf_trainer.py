"""Train a small language model with the Trainer of Hugging Face transformers, which knows torch's own backends alone.

rankmesh run --as-gloo --nproc-per-node 2 examples/integrations/hf_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from task import BATCH, SAMPLES, SEED, report
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)
torch.manual_seed(SEED)
shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
starts = torch.arange(SAMPLES) % 64
tokens = (starts[:, None] + torch.arange(16)) % 64  # counting, from each number on
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        num_train_epochs=4,
        learning_rate=0.01,
        per_device_train_batch_size=BATCH,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    result = trainer.train()
report(model, result.training_loss)
