"""The example's network against finite differences and the definition of what it computes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

WIDTHS = (5, 7, 4, 3)


@pytest.fixture
def network_module(examples: Path) -> ModuleType:
    return importlib.import_module("network")


def batch(samples: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.normal(size=(samples, WIDTHS[0])), random.integers(WIDTHS[-1], size=samples)


@pytest.mark.parametrize("widths", [(5, 3), (5, 7, 3), WIDTHS])
def test_gradient_is_the_derivative_of_the_loss(network_module: ModuleType, widths: tuple[int, ...]) -> None:
    network = network_module.Network(widths, seed=2)
    network.parameters += 0.01 * np.random.default_rng(3).normal(size=network.parameters.size)  # biases are 0 at first
    samples, labels = batch(6)
    _, gradient = network.loss_and_gradient(samples, labels)

    step = 1e-6
    differences = np.empty_like(gradient)
    for index, value in enumerate(network.parameters.copy()):
        losses = []
        for moved in (value - step, value + step):
            network.parameters[index] = moved
            losses.append(network.loss_and_gradient(samples, labels)[0])
        network.parameters[index] = value
        differences[index] = (losses[1] - losses[0]) / (2 * step)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", range(1, 9))
def test_parts_of_a_batch_add_up_to_the_batch(network_module: ModuleType, parts: int) -> None:
    network = network_module.Network(WIDTHS, seed=2)
    samples, labels = batch(6)  # for 7 and 8 parts some are empty
    whole = np.append(*reversed(network.loss_and_gradient(samples, labels)))
    summed = sum(
        np.append(*reversed(network.loss_and_gradient(samples[part], labels[part])))
        for part in np.array_split(np.arange(6), parts)
    )
    np.testing.assert_allclose(summed, whole, rtol=1e-12, atol=1e-14)


def test_layers_are_views_that_cover_all_parameters(network_module: ModuleType) -> None:
    network = network_module.Network(WIDTHS, seed=2)
    for layer in network.layers:
        layer.weights[:] = 1
        layer.biases[:] = 1
    assert network.parameters.tolist() == [1.0] * network.parameters.size


def test_same_seed_same_network(network_module: ModuleType) -> None:
    first, second, other = (network_module.Network(WIDTHS, seed).parameters for seed in (4, 4, 5))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_log_softmax_does_not_overflow(network_module: ModuleType) -> None:
    logits = np.array([[1e4, 0.0], [-1e4, -1e4]])
    np.testing.assert_allclose(network_module.log_softmax(logits), [[0, -1e4], [-np.log(2), -np.log(2)]])


def test_accuracy_counts_the_right_ones(network_module: ModuleType) -> None:
    network = network_module.Network((3, 3), seed=0)
    network.layers[0].weights[:] = np.eye(3)  # the class is the largest feature
    assert network.accuracy(np.eye(3), np.array([0, 1, 1])) == pytest.approx(2 / 3)


def test_momentum_follows_its_definition(network_module: ModuleType) -> None:
    parameters = np.array([1.0])
    optimizer = network_module.Momentum(parameters, rate=0.1, momentum=0.5)
    optimizer.step(np.array([2.0]))
    assert parameters == pytest.approx([1 - 0.1 * 2])
    optimizer.step(np.array([4.0]))
    assert parameters == pytest.approx([0.8 - 0.1 * (0.5 * 2 + 4)])
