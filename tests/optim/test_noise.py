"""The plain functions: what two batch sizes tell, averages of ratios, the rate and the cost of a batch."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_megapar.config import ConfigError
from lightning_megapar.optim.noise import Moments, RunningMoments, moments, rate_factor, samples_needed, steps_needed


def test_exact_moments_of_exact_norms() -> None:
    found = moments(5.0 + 40.0 / 4, 4, 5.0 + 40.0 / 32, 32)
    assert found.grad_sq == pytest.approx(5.0, rel=1e-14) and found.trace == pytest.approx(40.0, rel=1e-14)


@pytest.mark.parametrize(("small", "big"), [(8, 8), (9, 8), (0, 8)])
def test_one_size_tells_nothing(small: float, big: float) -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        moments(1.0, small, 1.0, big)


def test_unequal_small_batches_are_unbiased() -> None:
    """Batches of 2, 3 and 11 samples, weighted by their sizes: the mean over many draws is the truth."""
    generator = torch.Generator().manual_seed(0)
    sizes, truth, spread = [2, 3, 11], torch.tensor([1.0, -2.0]), torch.tensor([3.0, 1.0])
    draws = truth + spread * torch.randn(40000, 16, 2, generator=generator, dtype=torch.float64)
    pieces = [piece.mean(1) for piece in draws.split(sizes, 1)]
    small_sq = sum(n / 16 * piece.square().sum(1) for n, piece in zip(sizes, pieces)).mean()
    found = moments(float(small_sq), 16 / 3, float(draws.mean(1).square().sum(1).mean()), 16)
    assert found.grad_sq == pytest.approx(5.0, rel=0.02) and found.trace == pytest.approx(10.0, rel=0.01)


def test_means_are_unbiased_from_the_first_window_on() -> None:
    running = RunningMoments(0.9)
    assert running.noise_scale is None and running.grad_sq is None and running.trace is None
    for _ in range(3):
        running.update(Moments(2.0, 30.0))
        assert running.grad_sq == pytest.approx(2.0, rel=1e-14) and running.trace == pytest.approx(30.0, rel=1e-14)
        assert running.noise_scale == pytest.approx(15.0, rel=1e-14)


def test_ratio_of_means_and_not_mean_of_ratios() -> None:
    running = RunningMoments(0.5)
    running.update(Moments(1.0, 10.0))
    running.update(Moments(3.0, 2.0))
    assert running.noise_scale == pytest.approx((0.25 * 10 + 0.5 * 2) / (0.25 * 1 + 0.5 * 3), rel=1e-14)


def test_unknown_while_the_noise_hides_the_gradient_and_overflows_are_left_out() -> None:
    running = RunningMoments(0.9)
    running.update(Moments(-1.0, 5.0))
    assert running.noise_scale is None and running.grad_sq == pytest.approx(-1.0)
    for bad in (math.inf, math.nan):
        running.update(Moments(bad, 1.0))
        running.update(Moments(1.0, bad))
    assert running.grad_sq == pytest.approx(-1.0)
    again = RunningMoments(0.9)
    again.load_state_dict(running.state_dict())
    again.update(Moments(4.0, 1.0))
    running.update(Moments(4.0, 1.0))
    assert again.noise_scale == running.noise_scale is not None


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_out_of_range(decay: float) -> None:
    with pytest.raises(ConfigError, match="0 <= decay < 1"):
        RunningMoments(decay)


def test_the_rate_rises_with_the_batch() -> None:
    factors = [rate_factor(batch, 100.0) for batch in (1, 10, 100, 1000, 1e9)]
    assert factors == sorted(factors) and factors[2] == 0.5
    assert factors[0] == pytest.approx(1 / 101) and factors[-1] == pytest.approx(1.0)
    assert rate_factor(1, 1e6, 0.5) / rate_factor(4, 1e6, 0.5) == pytest.approx(0.5, rel=1e-5)  # square root rule


def test_cost_of_a_batch() -> None:
    assert steps_needed(100, 100, 7) == 14 and samples_needed(100, 100, 7) == 14
    # E = B S on the whole curve, when E_min = B_noise S_min.
    assert samples_needed(30, 90, 90 * 5) == pytest.approx(30 * steps_needed(30, 90, 5))
