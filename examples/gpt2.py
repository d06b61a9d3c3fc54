"""GPT-2 in plain NumPy, float32, split over ranks as Megatron-LM splits it (Shoeybi et al. 2019, section 3).

Each rank computes some of the heads, of the MLP's units and of the vocabulary's logits. Both halves of a layer end with
a sum over the ranks, of 3 KiB in the smallest GPT-2, and a token with the choice among each rank's likeliest: 2
all_reduces a layer, and one more. What sums an array over the ranks is an argument: this file needs NumPy alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

Array = np.ndarray
HEAD = 64
"""Width of a head, in GPT-2 of every size."""


def random_weights(layers: int = 12, heads: int = 12, vocabulary: int = 50257, seed: int = 0) -> dict[str, Array]:
    """Return weights by the names of the published files: the same seed gives every rank the same."""
    random, width = np.random.default_rng(seed), heads * HEAD

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, np.float32) * np.float32(0.02)

    weights = {"wte.weight": normal(vocabulary, width), "wpe.weight": normal(1024, width)}
    shapes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in range(layers):
        for name, (inputs, outputs) in shapes.items():
            weights[f"h.{layer}.{name}.weight"] = normal(inputs * width, outputs * width)
            weights[f"h.{layer}.{name}.bias"] = normal(outputs * width)
    for name in ["ln_f", *(f"h.{layer}.ln_{half}" for layer in range(layers) for half in (1, 2))]:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + normal(width), normal(width)
    return weights


def load(path: Path) -> dict[str, Array]:
    """Return the float32 arrays of a safetensors file by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    data = np.memmap(path, mode="r", offset=8 + length)
    return {
        name: data[slice(*entry["data_offsets"])].view(np.float32).reshape(entry["shape"])
        for name, entry in entries.items()
        if entry.get("dtype") == "F32"
    }


class Layer:
    """Our part of a layer: ``width`` is the range of our heads, ``units`` that of our units of the MLP."""

    def __init__(self, weights: Mapping[str, Array], name: str, width: slice, units: slice, positions: int) -> None:
        def columns(kind: str, blocks: int, ours: slice) -> Array:
            whole = weights[f"{name}.{kind}"]  # queries, keys and values are blocks of columns side by side
            return whole.reshape(*whole.shape[:-1], blocks, -1)[..., ours].reshape(*whole.shape[:-1], -1)

        self._attention_norm, self._mlp_norm = (norm_of(weights, f"{name}.ln_{half}") for half in (1, 2))
        self._qkv, self._qkv_bias = (columns(f"attn.c_attn.{kind}", 3, width) for kind in ("weight", "bias"))
        self._units, self._units_bias = (columns(f"mlp.c_fc.{kind}", 1, units) for kind in ("weight", "bias"))
        self._attention_rows = weights[f"{name}.attn.c_proj.weight"][width].copy()
        self._mlp_rows = weights[f"{name}.mlp.c_proj.weight"][units].copy()
        self.attention_bias, self.mlp_bias = (weights[f"{name}.{half}.c_proj.bias"] for half in ("attn", "mlp"))
        heads = self._qkv_bias.size // (3 * HEAD)
        self._keys, self._values = np.zeros((2, heads, positions, HEAD), np.float32)

    def attention(self, hidden: Array, position: int) -> Array:
        """Return our heads' part of the attention to this token and those before it, whose keys and values are kept."""
        qkv = self._attention_norm(hidden) @ self._qkv + self._qkv_bias
        query, self._keys[:, position], self._values[:, position] = qkv.reshape(3, -1, HEAD)
        seen = slice(position + 1)
        scores = query[:, None] @ self._keys[:, seen].swapaxes(1, 2) / HEAD**0.5
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ self._values[:, seen]).reshape(-1) @ self._attention_rows

    def mlp(self, hidden: Array) -> Array:
        """Return our units' part of the MLP."""
        units = self._mlp_norm(hidden) @ self._units + self._units_bias
        units *= 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (units + 0.044715 * units**3)))  # GELU
        return units @ self._mlp_rows


class GPT2:
    """Our part of the model.

    Args:
        weights: the whole model's, by the names of the published files.
        rank, size: which part of how many.
        all_reduce: sums an array over the ranks, in place.
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        rank: int = 0,
        size: int = 1,
        all_reduce: Callable[[Array], object] = lambda array: None,
    ) -> None:
        def ours(count: int, unit: int = 1) -> slice:
            return slice(count * rank // size * unit, count * (rank + 1) // size * unit)

        self._rank, self._size, self._all_reduce = rank, size, all_reduce
        self._embedding, self._positions = weights["wte.weight"], weights["wpe.weight"]
        vocabulary, width = self._embedding.shape
        self._tokens = ours(vocabulary)
        parts = ours(width // HEAD, HEAD), ours(4 * width)
        layers = sum(name.endswith(".ln_1.weight") for name in weights)
        self._layers = [Layer(weights, f"h.{layer}", *parts, len(self._positions)) for layer in range(layers)]
        self._norm = norm_of(weights, "ln_f")

    def generate(self, prompt: Sequence[int], count: int) -> Iterator[tuple[int, float]]:
        """Yield the likeliest tokens after the prompt, one after the other, each with its logit."""
        for position, token in enumerate(prompt):
            likeliest = self._step(token, position)
        yield likeliest
        for position in range(len(prompt), len(prompt) + count - 1):
            likeliest = self._step(likeliest[0], position)
            yield likeliest

    def _step(self, token: int, position: int) -> tuple[int, float]:
        """Read the token at a position, and return the likeliest next one with its logit."""
        hidden = self._embedding[token] + self._positions[position]
        for layer in self._layers:
            hidden += self._sum(layer.attention(hidden, position)) + layer.attention_bias
            hidden += self._sum(layer.mlp(hidden)) + layer.mlp_bias
        logits = self._embedding[self._tokens] @ self._norm(hidden)
        likeliest = np.zeros((self._size, 2), np.float32)  # float32 counts to 16 million
        likeliest[self._rank] = self._tokens.start + logits.argmax(), logits.max()
        best, logit = max(self._sum(likeliest).tolist(), key=lambda pair: pair[1])
        return int(best), logit

    def _sum(self, array: Array) -> Array:
        self._all_reduce(array)
        return array


def norm_of(weights: Mapping[str, Array], name: str) -> Callable[[Array], Array]:
    """Return a layer normalisation."""
    scale, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def norm(hidden: Array) -> Array:
        centred = hidden - hidden.mean()
        return centred / np.sqrt(centred @ centred / len(hidden) + 1e-5) * scale + bias

    return norm
