"""The example's network against finite differences and the definition of what it computes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

WIDTHS = (5, 7, 4, 3)


@pytest.fixture
def network_module(examples: Path) -> ModuleType:
    return importlib.import_module("network")


def batch(samples: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.normal(size=(samples, WIDTHS[0])), random.integers(WIDTHS[-1], size=samples)


def backward(network: Any, samples: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    gradients = {name: np.full_like(parameter, np.nan) for name, parameter in network.parameters.items()}
    return network.backward(samples, labels, gradients, lambda name: None), gradients


@pytest.mark.parametrize("widths", [(5, 3), (5, 7, 3), WIDTHS])
def test_gradients_are_the_derivatives_of_the_loss(network_module: ModuleType, widths: tuple[int, ...]) -> None:
    network = network_module.Network(widths, seed=2)
    random = np.random.default_rng(3)
    samples, labels = batch(6)
    for parameter in network.parameters.values():
        parameter += 0.01 * random.normal(size=parameter.shape)  # biases are 0 at first
    _, gradients = backward(network, samples, labels)

    step = 1e-6
    for name, parameter in network.parameters.items():
        differences = np.empty_like(parameter)
        for index, value in np.ndenumerate(parameter.copy()):
            losses = []
            for moved in (value - step, value + step):
                parameter[index] = moved
                losses.append(backward(network, samples, labels)[0])
            parameter[index] = value
            differences[index] = (losses[1] - losses[0]) / (2 * step)
        np.testing.assert_allclose(gradients[name], differences, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_the_means_of_equal_parts_have_the_mean_of_the_batch(network_module: ModuleType, parts: int) -> None:
    network = network_module.Network(WIDTHS, seed=2)
    samples, labels = batch(6)
    loss, gradients = backward(network, samples, labels)
    found = [backward(network, samples[part], labels[part]) for part in np.split(np.arange(6), parts)]
    assert np.mean([loss_of_part for loss_of_part, _ in found]) == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        mean = np.mean([gradients_of_part[name] for _, gradients_of_part in found], axis=0)
        np.testing.assert_allclose(mean, gradient, rtol=1e-12, atol=1e-14)


def test_every_gradient_is_ready_once_from_the_last_to_the_first_and_not_touched_again(
    network_module: ModuleType,
) -> None:
    network = network_module.Network(WIDTHS, seed=2)
    gradients = {name: np.empty_like(parameter) for name, parameter in network.parameters.items()}
    when_ready: dict[str, np.ndarray] = {}

    def ready(name: str) -> None:
        assert name not in when_ready
        when_ready[name] = gradients[name].copy()

    network.backward(*batch(6), gradients, ready)
    assert list(when_ready) == list(reversed(network.parameters))
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, when_ready[name])


def test_log_softmax_does_not_overflow(network_module: ModuleType) -> None:
    logits = np.array([[1e4, 0.0], [-1e4, -1e4]])
    np.testing.assert_allclose(network_module.log_softmax(logits), [[0, -1e4], [-np.log(2), -np.log(2)]])


def test_momentum_follows_its_definition(network_module: ModuleType) -> None:
    parameter = np.array([1.0])
    optimizer = network_module.Momentum({"x": parameter}, rate=0.1, momentum=0.5)
    optimizer.step({"x": np.array([2.0])})
    assert parameter == pytest.approx([1 - 0.1 * 2])
    optimizer.step({"x": np.array([4.0])})
    assert parameter == pytest.approx([0.8 - 0.1 * (0.5 * 2 + 4)])
