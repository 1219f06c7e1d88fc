"""Gradients that are accumulated in an arena.

Autograd adds to a ``.grad`` that is there, in place, so it only has to be there before the first gradient arrives. It
is filled with -0.0, the number to which every other one is added without a change (0.0 would turn -0.0 into 0.0). It
costs a pass over each gradient that autograd, which takes the first one as it is, does without.

What a parameter's gradient is like (its dtype, its strides, whether it is dense) is not known before one has come.
Hence a parameter's first gradient is autograd's own, and the next ones are made like the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megapar.memory.arena import Arena


class GradientStash:
    """Lets gradients come to lie in an arena, step by step.

    Args:
        arena: of the parameters' device; others are left to autograd.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._known = WeakTensorKeyDictionary()  # parameter -> dtype and strides of its last gradient

    @contextmanager
    def step(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Around backwards: a step of the arena, with gradients in it.

        Parameters that have a gradient already keep it and get more of it. Behind it a parameter that nothing has
        reached has ``None`` again; meanwhile it has a gradient of (negative) zeros. What hooks set in place of a
        gradient stays.

        Args:
            parameters: leaves whose ``.grad`` autograd fills; not those of FSDP2, which moves gradients itself.
        """
        with self.arena.step():
            parameters = list(parameters)
            held = [(one, made) for one in parameters if (made := self._made(one)) is not None]
            versions = [made._version for _, made in held]
            try:
                yield
            finally:
                for (parameter, made), version in zip(held, versions, strict=True):
                    if parameter.grad is made and made._version == version:
                        parameter.grad = None
                for parameter in parameters:
                    self._learn(parameter)
                # Nothing may outlive the step by being named here.
                held.clear()
                made = None

    def _made(self, parameter: Tensor) -> Tensor | None:
        known = self._known.get(parameter)
        if known is None or parameter.grad is not None or not parameter.requires_grad:
            return None
        dtype, strides = known
        made = self.arena.empty(parameter.shape, dtype, strides).fill_(-0.0)
        self.arena.movable(made)
        parameter.grad = made
        return made

    def _learn(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:
            return
        # Of a tensor without gaps and overlaps, torch makes another with the same strides.
        if (
            type(grad) is Tensor
            and grad.layout == torch.strided
            and grad.device == self.arena.device
            and grad.is_floating_point()
            and grad.stride() == torch.empty_like(grad, device="meta").stride()
        ):
            self._known[parameter] = grad.dtype, grad.stride()
        else:
            self._known.pop(parameter, None)
