"""A small neural network in plain NumPy: ReLU layers, softmax cross-entropy, SGD with momentum.

The backward pass is written by hand. It goes from the last layer to the first, and reports each gradient when it is
complete, so that a caller can send it to other processes before the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """The weights ``[inputs, outputs]`` and biases ``[outputs]`` of one fully connected layer."""

    weights: np.ndarray
    biases: np.ndarray


class Network:
    """A multi-layer perceptron that classifies.

    Args:
        widths: features of a sample, units of each hidden layer, classes.
        seed: of the initial weights; the same seed gives the same network, on every rank.

    Attributes:
        parameters: the arrays to train, by name: ``weights 0``, ``biases 0``, ``weights 1`` and so on.
    """

    def __init__(self, widths: Sequence[int], seed: int) -> None:
        random = np.random.default_rng(seed)
        self.layers = []
        for inputs, outputs in pairwise(widths):
            scale = np.sqrt(2 / inputs)  # He et al. 2015: keeps the variance through ReLU layers
            self.layers.append(Layer(random.normal(scale=scale, size=(inputs, outputs)), np.zeros(outputs)))
        self.parameters = {
            f"{kind} {number}": array
            for number, layer in enumerate(self.layers)
            for kind, array in layer._asdict().items()
        }

    def backward(
        self,
        samples: np.ndarray,
        labels: np.ndarray,
        gradients: Mapping[str, np.ndarray],
        ready: Callable[[str], object],
    ) -> float:
        """Return the mean cross-entropy of the samples, and compute its gradients.

        Args:
            samples: ``[n, features]``, at least one.
            labels: ``[n]``, their classes.
            gradients: where the gradients go, by the parameters' names.
            ready: called with the name of each gradient that is complete.
        """
        inputs = self._inputs_of_layers(samples)
        log_probabilities = log_softmax(inputs.pop())
        rows = np.arange(len(labels))
        loss = -log_probabilities[rows, labels].mean()

        delta = np.exp(log_probabilities)
        delta[rows, labels] -= 1
        delta /= len(labels)  # the derivative by the logits
        for number, (layer, given) in reversed(list(enumerate(zip(self.layers, inputs, strict=True)))):
            delta.sum(axis=0, out=gradients[f"biases {number}"])
            ready(f"biases {number}")
            np.matmul(given.T, delta, out=gradients[f"weights {number}"])
            ready(f"weights {number}")
            delta = (delta @ layer.weights.T) * (given > 0)
        return float(loss)

    def accuracy(self, samples: np.ndarray, labels: np.ndarray) -> float:
        """Return the share of samples whose likeliest class is the right one."""
        logits = self._inputs_of_layers(samples)[-1]
        return float(np.mean(logits.argmax(axis=1) == labels))

    def _inputs_of_layers(self, samples: np.ndarray) -> list[np.ndarray]:
        """Return the input of each layer, and at the end the logits, the last layer's output."""
        values = [samples]
        for layer in self.layers:
            values.append(values[-1] @ layer.weights + layer.biases)
            if layer is not self.layers[-1]:
                np.maximum(values[-1], 0, out=values[-1])
        return values


class Momentum:
    """Stochastic gradient descent with momentum, in place."""

    def __init__(self, parameters: Mapping[str, np.ndarray], rate: float, momentum: float = 0.9) -> None:
        self.parameters = parameters
        self.rate = rate
        self.momentum = momentum
        self.velocities = {name: np.zeros_like(parameter) for name, parameter in parameters.items()}

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        """Go one step down the gradients."""
        for name, velocity in self.velocities.items():
            velocity *= self.momentum
            velocity += gradients[name]
            self.parameters[name][...] -= self.rate * velocity


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax over the last axis, without overflow however large the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
