"""The text of a split GPT-2: that of its definition, whatever the number of ranks."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
TINY = {"layers": 2, "heads": 3, "vocabulary": 101}
PROMPT = [5, 100, 7]


@pytest.fixture
def gpt2(examples: Path) -> ModuleType:
    return importlib.import_module("gpt2")


def weights_of(gpt2: ModuleType) -> dict[str, np.ndarray]:
    """Return weights that are large enough for attention to matter, and for tokens to differ."""
    return {name: 5 * array for name, array in gpt2.random_weights(**TINY).items()}


def logits_of(weights: Mapping[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Return the logits of the token after some, from the whole text at once, in float64."""
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    count, heads = len(tokens), TINY["heads"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return scaled * wide[f"{name}.weight"] + wide[f"{name}.bias"]

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ wide[f"{name}.weight"] + wide[f"{name}.bias"]

    x = wide["wte.weight"][tokens] + wide["wpe.weight"][:count]
    for layer in range(TINY["layers"]):
        q, k, v = np.split(linear(f"h.{layer}.attn.c_attn", norm(f"h.{layer}.ln_1", x)), 3, axis=1)
        mixed = []
        for head in range(heads):
            part = slice(64 * head, 64 * (head + 1))
            scores = np.where(np.tri(count), np.exp(q[:, part] @ k[:, part].T / 8), 0)
            mixed.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, part])
        x = x + linear(f"h.{layer}.attn.c_proj", np.concatenate(mixed, axis=1))
        u = linear(f"h.{layer}.mlp.c_fc", norm(f"h.{layer}.ln_2", x))
        x = x + linear(f"h.{layer}.mlp.c_proj", u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))))
    return norm("ln_f", x[-1]) @ wide["wte.weight"].T


def test_each_token_is_the_likeliest_after_those_before_it(gpt2: ModuleType) -> None:
    weights = weights_of(gpt2)
    model = gpt2.GPT2(weights)
    text = list(PROMPT)
    for token, logit in model.generate(PROMPT, 12):
        logits = logits_of(weights, text)
        assert token == logits.argmax()
        assert logit == pytest.approx(logits.max(), abs=1e-2)
        text.append(token)
    assert len(text) == 15
    assert len(set(text)) > 5, "a text that says something about the model"
    assert [token for token, _ in model.generate(PROMPT, 12)] == text[3:], "once more"


def test_a_part_alone_has_other_logits(gpt2: ModuleType) -> None:
    weights = weights_of(gpt2)
    whole = next(gpt2.GPT2(weights).generate(PROMPT, 1))
    assert abs(next(gpt2.GPT2(weights, 0, 2).generate(PROMPT, 1))[1] - whole[1]) > 0.1


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_generate_what_one_does(python: Run, examples: Path, ranks: int) -> None:
    launcher = ["-m", "rankmesh.run", f"--nproc-per-node={ranks}", examples / "inference.py"]
    options = [f"--{name}={value}" for name, value in TINY.items()]
    done = python(*launcher, *options, "--tokens=9", "--prompt", *PROMPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"tokens:((?: \d+)+)$", done.stdout, re.MULTILINE)[0].split()) == 9
    assert re.search(rf"{ranks} ranks: [\d.]+ tokens/s, [\d.]+ ms a token, [\d.]+ ms of them in 5 ", done.stdout)


@pytest.mark.processes
def test_weights_of_a_file(python: Run, examples: Path, gpt2: ModuleType, tmp_path: Path) -> None:
    weights = weights_of(gpt2)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in {"mask": np.ones((3, 3), bool), **weights}.items():
        kind = "BOOL" if array.dtype == bool else "F32"
        offsets = [len(data), len(data) + array.nbytes]
        entries[name] = {"dtype": kind, "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    head = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    options = ["--weights=model.safetensors", "--tokens=4", "--prompt", *PROMPT]
    done = python("-m", "rankmesh.run", "--nproc-per-node=2", examples / "inference.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    tokens = " ".join(str(token) for token, _ in gpt2.GPT2(weights).generate(PROMPT, 4))
    assert f"tokens: {tokens}\n" in done.stdout
