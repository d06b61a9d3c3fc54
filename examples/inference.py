"""Generate text with GPT-2, split over the ranks of a host: docs/torch.md describes it, and has its speed.

    rankmesh run --nproc-per-node 2 examples/inference.py
    rankmesh run --nproc-per-node 2 examples/inference.py --weights model.safetensors --prompt 464 3280 318

Without a file the weights are random: such a text means nothing, but takes as long. Tokens are numbers, as a tokenizer
gives them. The model is in gpt2.py. At the end rank 0 generates the text with the whole model, and compares.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from gpt2 import GPT2, Array, load, random_weights

import rankmesh as dist

TOLERANCE = 1e-3
"""Largest difference of a logit that rounding may cause: the order of summation differs."""


def run(options: argparse.Namespace) -> bool:
    """Generate as a rank of the world; return whether one rank alone generates the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (options.layers, options.heads, options.vocabulary)
    weights = load(options.weights) if options.weights else random_weights(*shape)
    spent = []

    def all_reduce(array: Array) -> None:
        began = time.perf_counter()
        dist.all_reduce(array)
        spent.append(time.perf_counter() - began)

    model = GPT2(weights, rank, size, all_reduce)
    dist.barrier()
    found, seconds = generate(model, options)
    if rank:
        return True
    alone, seconds_alone = generate(GPT2(weights), options)
    difference = np.abs(found - alone).max()
    steps = len(options.prompt) + options.tokens - 1  # each reads one token
    print("tokens:", *found[:, 0].astype(int))
    print(f"one rank alone: {steps / seconds_alone:.1f} tokens/s, differs by {difference:.1e} at most")
    print(f"{size} ranks: {steps / seconds:.1f} tokens/s, {1e3 * seconds / steps:.2f} ms a token, ", end="")
    print(f"{1e3 * sum(spent) / steps:.2f} ms of them in {len(spent) // steps} all_reduces")
    return bool(difference <= TOLERANCE)


def generate(model: GPT2, options: argparse.Namespace) -> tuple[Array, float]:
    """Return tokens and their logits, ``[tokens, 2]``, and the seconds that they took."""
    began = time.perf_counter()
    found = list(model.generate(options.prompt, options.tokens))
    return np.array(found), time.perf_counter() - began


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Generate text with GPT-2, split over the ranks.")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    parser.add_argument("--prompt", type=int, nargs="+", default=[0], metavar="TOKEN", help="the tokens to begin with")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="of GPT-2 of any size: safetensors, float32")
    parser.add_argument("--layers", type=int, default=12, help="of random weights")
    parser.add_argument("--heads", type=int, default=12, help="of random weights, each 64 wide")
    parser.add_argument("--vocabulary", type=int, default=50257, help="of random weights")
    return parser.parse_args()


if __name__ == "__main__":
    dist.init_process_group()
    same = run(parse())
    dist.destroy_process_group()
    sys.exit(0 if same else "one rank alone generates another text")
