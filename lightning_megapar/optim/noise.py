"""How noisy a gradient is, and what follows for the batch size: plain functions of numbers.

McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162). A batch's gradient is the true one,
``G``, plus noise of covariance ``Sigma / B``; the simple noise scale ``B_noise = tr(Sigma) / |G|^2`` is the batch at
which both are of one size. Norms of gradients over batches of two sizes give unbiased estimates of both (appendix
A.1). Their ratio is biased, and the mean of ratios has no finite variance: numerator and denominator are averaged
separately, and divided last. (On a regression with an exact value of 54.3 the ratio of means gave 55.4 and the mean of
ratios 82.6.)

**The rate.** For SGD the best rate is ``eps_max / (1 + B_noise / B)`` (equation 2.9): it RISES with the batch, first in
proportion and then towards ``eps_max``, because a larger batch has less noise to fear. Articles give
``alpha_0 * min(1, sqrt(N / B))`` as well; it lowers the rate as soon as the batch ``B`` exceeds an ``N`` that is not
defined, so that larger batches would learn more slowly per step and per sample. Nothing here does that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_megapar.config import ConfigError


@dataclass(frozen=True)
class Moments:
    """Estimates from one window, each unbiased and each possibly negative.

    Args:
        grad_sq: ``|G|^2``, of the gradient over infinitely many samples.
        trace: ``tr(Sigma)``, of the covariance of the gradients of single samples.
    """

    grad_sq: float
    trace: float


def moments(small_sq: float, small: float, big_sq: float, big: float) -> Moments:
    """Unbiased ``|G|^2`` and ``tr(Sigma)`` from squared norms of gradients over batches of two sizes.

    Args:
        small_sq: (mean of) squared norms of gradients over ``small`` samples. Of batches of unequal sizes ``n_i``:
            their mean weighted by ``n_i``, with ``small`` the plain mean of the ``n_i``.
        small: samples.
        big_sq: squared norm of the gradient over ``big`` samples.
        big: samples, more than ``small``.

    Raises:
        ValueError: when ``big`` is not above ``small``: one size tells nothing.
    """
    if not 0 < small < big:
        raise ValueError(f"two batch sizes are needed, got small={small} and big={big}")
    grad_sq = (big * big_sq - small * small_sq) / (big - small)
    trace = (small_sq - big_sq) / (1 / small - 1 / big)
    return Moments(grad_sq, trace)


class RunningMoments:
    """Exponential means of both moments, without the bias of their start; their ratio is the noise scale.

    Args:
        decay: of the means, at least 0 and below 1; 0.99 remembers about 100 windows.
        name: of the setting, for its refusal.

    Raises:
        ConfigError: a decay out of its range.
    """

    def __init__(self, decay: float = 0.99, name: str = "decay") -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float):
            raise ConfigError(f"{name}={decay!r}: expected a number, 0 <= decay < 1")
        if not 0.0 <= decay < 1.0:
            raise ConfigError(
                f"{name}={decay!r}: expected 0 <= decay < 1 (nearest valid: {0.0 if decay < 0 else 0.99})"
            )
        self.decay = decay
        self._sums = (0.0, 0.0)
        self._weight = 0.0

    def update(self, found: Moments) -> None:
        """Take in one window; one that is not finite (an overflow in half precision) is left out."""
        if not (math.isfinite(found.grad_sq) and math.isfinite(found.trace)):
            return
        keep, take = self.decay, 1.0 - self.decay
        self._sums = (keep * self._sums[0] + take * found.grad_sq, keep * self._sums[1] + take * found.trace)
        self._weight = keep * self._weight + take

    @property
    def grad_sq(self) -> float | None:
        """Mean of ``|G|^2``, ``None`` before the first window."""
        return self._sums[0] / self._weight if self._weight else None

    @property
    def trace(self) -> float | None:
        """Mean of ``tr(Sigma)``, ``None`` before the first window."""
        return self._sums[1] / self._weight if self._weight else None

    @property
    def noise_scale(self) -> float | None:
        """``B_noise`` in samples; ``None`` while the means are not both positive (too few windows so far)."""
        grad_sq, trace = self._sums
        return trace / grad_sq if grad_sq > 0 and trace > 0 else None

    def state_dict(self) -> dict[str, float]:
        return {"grad_sq": self._sums[0], "trace": self._sums[1], "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._sums = (float(state["grad_sq"]), float(state["trace"]))
        self._weight = float(state["weight"])


def rate_factor(batch_size: float, noise_scale: float, exponent: float = 1.0) -> float:
    """What part of the largest useful rate a batch may take: ``(1 + B_noise / B) ** -exponent``.

    Args:
        batch_size: samples of an optimizer step.
        noise_scale: ``B_noise``, in samples.
        exponent: 1 for SGD. For Adam, which divides by the gradient's own size, between 0.5 (noise dominates; square
            root rule, Malladi et al., arXiv 2205.10287) and 1.

    Returns:
        between 0 and 1, rising with the batch.
    """
    return float((1.0 + noise_scale / batch_size) ** -exponent)


def steps_needed(batch_size: float, noise_scale: float, least_steps: float) -> float:
    """Optimizer steps to a given loss: ``S = S_min (1 + B_noise / B)``."""
    return least_steps * (1.0 + noise_scale / batch_size)


def samples_needed(batch_size: float, noise_scale: float, least_samples: float) -> float:
    """Samples to a given loss: ``E = E_min (1 + B / B_noise)``."""
    return least_samples * (1.0 + batch_size / noise_scale)
