"""A small neural network in plain NumPy: ReLU layers, softmax cross-entropy, SGD with momentum.

All parameters live in one flat array, and the weights and biases of the layers are views into it; the gradient is laid
out the same way. So whoever wants to send the gradient to other processes has one array to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """The weights ``[inputs, outputs]`` and biases ``[outputs]`` of one fully connected layer."""

    weights: np.ndarray
    biases: np.ndarray


def views(flat: np.ndarray, widths: Sequence[int]) -> list[Layer]:
    """Return the layers between ``widths`` as views into the flat array: writing to one writes to the other."""
    layers = []
    begin = 0
    for inputs, outputs in pairwise(widths):
        middle = begin + inputs * outputs
        end = middle + outputs
        layers.append(Layer(flat[begin:middle].reshape(inputs, outputs), flat[middle:end]))
        begin = end
    return layers


class Network:
    """A multi-layer perceptron that classifies.

    Args:
        widths: features of a sample, units of each hidden layer, classes.
        seed: of the initial weights; the same seed gives the same network, on every rank.

    Attributes:
        parameters: all weights and biases, one flat float64 array.
    """

    def __init__(self, widths: Sequence[int], seed: int) -> None:
        self.widths = tuple(widths)
        size = sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))
        self.parameters = np.zeros(size)
        self.layers = views(self.parameters, widths)
        random = np.random.default_rng(seed)
        for layer in self.layers:
            scale = np.sqrt(2 / len(layer.weights))  # He et al. 2015: keeps the variance through ReLU layers
            layer.weights[:] = random.normal(scale=scale, size=layer.weights.shape)

    def loss_and_gradient(self, samples: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the cross-entropy *summed* over the samples, and its gradient, flat like ``parameters``.

        A sum, and not a mean, because sums over parts of a batch add up to the sum over the batch however uneven the
        parts are. No samples at all give zero.
        """
        inputs = self._inputs_of_layers(samples)
        log_probabilities = log_softmax(inputs.pop())
        rows = np.arange(len(labels))
        loss = -log_probabilities[rows, labels].sum()

        gradient = np.empty_like(self.parameters)
        delta = np.exp(log_probabilities)
        delta[rows, labels] -= 1  # the derivative by the logits
        for layer, given, slot in reversed(list(zip(self.layers, inputs, views(gradient, self.widths), strict=True))):
            np.matmul(given.T, delta, out=slot.weights)
            delta.sum(axis=0, out=slot.biases)
            delta = (delta @ layer.weights.T) * (given > 0)
        return float(loss), gradient

    def accuracy(self, samples: np.ndarray, labels: np.ndarray) -> float:
        """Return the share of samples whose likeliest class is the right one."""
        logits = self._inputs_of_layers(samples)[-1]
        return float(np.mean(logits.argmax(axis=1) == labels))

    def _inputs_of_layers(self, samples: np.ndarray) -> list[np.ndarray]:
        """Return what goes into each layer, and at the end the logits that come out of the last one."""
        values = [samples]
        for layer in self.layers:
            values.append(values[-1] @ layer.weights + layer.biases)
            if layer is not self.layers[-1]:
                np.maximum(values[-1], 0, out=values[-1])
        return values


class Momentum:
    """Stochastic gradient descent with momentum, in place on a flat array of parameters."""

    def __init__(self, parameters: np.ndarray, rate: float, momentum: float = 0.9) -> None:
        self.parameters = parameters
        self.rate = rate
        self.momentum = momentum
        self.velocity = np.zeros_like(parameters)

    def step(self, gradient: np.ndarray) -> None:
        """Go one step down the gradient."""
        self.velocity *= self.momentum
        self.velocity += gradient
        self.parameters -= self.rate * self.velocity


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax over the last axis, without overflow however large the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
