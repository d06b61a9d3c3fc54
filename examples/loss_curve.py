"""The picture of a training: loss over epochs, for one or more runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COLOURS = ("tab:blue", "tab:orange")
STYLES = ("solid", (0, (2, 2)))
"""Runs that agree lie on each other; dashes let the one below show."""


def draw(runs: Mapping[str, np.ndarray], *, epochs: int, title: str, path: Path) -> None:
    """Save the loss curves as a picture.

    Args:
        runs: name and loss of every step; about the same number of steps in each epoch.
        epochs: how many epochs the steps make.
        title: title of the picture.
        path: where it goes; folders are made.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # and not pyplot, which may want a screen
    axes = figure.subplots()
    for (name, losses), colour, style in zip(runs.items(), COLOURS, STYLES, strict=False):
        steps = (np.arange(len(losses)) + 1) * epochs / len(losses)
        axes.plot(steps, losses, color=colour, alpha=0.15, linewidth=1)
        means = [part.mean() for part in np.array_split(losses, epochs)]
        axes.plot(np.arange(epochs) + 0.5, means, color=colour, linestyle=style, linewidth=2.5, label=name)
    axes.set(xlabel="epoch", ylabel="cross-entropy", yscale="log", xlim=(0, epochs))
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="mean of an epoch (faint: each step)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
