"""One training, validation, test or predict step as a pipeline of microbatches.

The user's own step runs unchanged, once per microbatch and stage. A training step runs the whole schedule, forwards
and backwards, inside Lightning's ``training_step``; its gradients wait in a stash, and the loss handed to Lightning is
a proxy whose backward moves them into ``.grad``. Lightning's order of hooks (zero_grad, on_before_backward, an
overridden ``backward``, on_after_backward, clipping, step), accumulation and loss scaling then work as always.

The loss rule, for microbatches ``i`` of all data ranks: without a word from the user, the gradient is that of the mean
of the microbatch losses weighted by samples, divided by ``accumulate_grad_batches`` as in Lightning. When the step
returns ``{"loss": mean over valid tokens, "num_valid_tokens": n}``, it is that of ``sum(n_i loss_i) / sum(n_i)`` over
microbatches, data ranks and the whole accumulation window: the loss of one big batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.batches import (
    detach,
    split_batch,
)
from lightning_megapar.data_parallel.agreement import (
    TOLERANCE,
    declared,
    losses_differ,
    undeclared_addends,
    unlike_buffers,
)
from lightning_megapar.data_parallel.gradients import GradientReducer
from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.step.base import StepContractError, StepResult, Window
from lightning_megapar.step.evaluation import Evaluation
from lightning_megapar.step.likeness import tell_news
from lightning_megapar.step.log import LogRecorder
from lightning_megapar.step.outcome import joined, loss_of, weigh_by_tokens
from lightning_megapar.step.stage_metrics import from_last_stage
from lightning_megapar.step.tokens import tokens_in

__all__ = ["StepContractError", "StepResult", "Stepper"]


class _HandOver(torch.autograd.Function):
    """Proxy loss: its value is the step's loss, its backward installs the step's gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, install: Callable[[Tensor], None]) -> Tensor:
        ctx.install = install
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.install(grad_outputs[0])
        return torch.zeros_like(grad_outputs[0]), None, None


class Stepper(Evaluation):
    """Runs steps on one rank; see :class:`~lightning_megapar.step.base.StepperBase` for its arguments."""

    # -- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        results: Any,
        accumulate: int,
        is_last_of_window: bool,
        loss_scale: float = 1.0,
        flag: float = 0.0,
        share: bool = False,
        collect: bool = False,
        nominal: int | None = None,
    ) -> StepResult:
        """Run one training batch.

        Args:
            step: the user's ``training_step`` with everything but the batch bound.
            batch: this rank's batch (the same on all stages and tensor ranks of a data rank).
            results: Lightning's result collection, on which ``self.log`` is recorded.
            accumulate: ``accumulate_grad_batches`` in force.
            is_last_of_window: whether the optimizer steps after this batch.
            loss_scale: of the losses of all stages. Gradients are divided by it when they reach ``.grad``, unless the
                backward of the loss that is returned is scaled as well.
            flag: shown to every rank in the report.
            share: give the user's output to every stage, not only to the last one.
            collect: give each replica the outputs of its own samples, where others work on some of them.
            nominal: the loader's batch size, where it is known.

        Raises:
            StepContractError: a loss without gradient, a ``None`` loss, ``num_valid_tokens`` on some microbatches only.
        """
        if self.zero is not None:
            self.zero.begin_step()
        pieces = split_batch(batch, self.num_microbatches, nominal)
        mark = self._fingerprint(batch, len(pieces), "train")
        samples = sum(count for _, count in pieces)
        window = self._window
        parameters = self._parameters
        is_first = not window.is_open
        if is_first:
            self._refuse_switched()
            # Lightning zeroes gradients only after training_step; free them before the forwards need the memory.
            self._window = window = Window(is_open=True)
            for record in parameters:
                record.parameter.grad = None
        if self.observer is not None:
            self.observer.begin_batch(parameters, is_first, samples)
        window.trained.update(record.name for record in self.parameters)
        kept = [record.parameter.grad for record in parameters]
        for record in parameters:
            record.parameter.grad = None

        # While the schedule runs, microbatch losses are weighted in units of ``unit``; what is missing to the true
        # weight is a factor that is exactly 1 in the ordinary case and applied when the gradients are handed over.
        total, most = samples, len(pieces)
        if self._counts_must_agree or (self.zero is not None and self._token_unit is None and not window.by_tokens):
            total, most = self._over_data_ranks(samples, len(pieces))
        unit = self._unit(window, samples, total)
        scale = loss_scale / accumulate
        sizes = [count for _, count in pieces]
        pieces, self._origins = self.sharing.spread(pieces)
        counting = len(pieces)
        if self._counts_must_agree:
            pieces = self._filled_up(pieces, most)
            self._origins += [(self._origins[-1][0], number) for number in range(counting, most)]
        recorder = LogRecorder()
        losses: list[Tensor] = []
        weights: list[Tensor] = []
        by_tokens: list[bool] = []
        by_microbatch: dict[int, Any] = {}

        def forward(chunk: int, microbatch: int, received: Any) -> tuple[bool, Any]:
            piece, count = pieces[microbatch]
            if microbatch >= counting:
                log = LogRecorder()
                log.begin_microbatch(microbatch, count)
                with self.state_kept(), log.attached(results):
                    finished, value = self._call(lambda: step(piece), microbatch, received, chunk)
                return finished, (loss_of(value)[0], self._weight(0, None)) if finished else value
            log = self._recorder_of(chunk, recorder)
            log.begin_microbatch(microbatch, count)
            with log.attached(results):
                finished, value = self._call(lambda: step(piece), microbatch, received, chunk)
            if finished:
                loss, tokens = loss_of(value)
                tokens = tokens_in(piece, count, self.count_tokens) if tokens is None else tokens
                losses.append(loss.detach())
                weights.append(self._weight(count, tokens))
                by_tokens.append(tokens is not None)
                by_microbatch[microbatch] = detach(value)
                return True, (loss, weights[-1])
            return False, value

        def backward(microbatch: int, result: tuple[Tensor, Tensor]) -> None:
            loss, weight = result
            # A microbatch without a valid token has a mean over nothing: it must count as zero, not as NaN.
            loss = torch.where(weight > 0, loss, torch.zeros_like(loss))
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # a loss scale may exceed float16's range
            with self.explained():
                (loss * (weight / unit * scale).to(loss.dtype)).backward()

        self._rehearse("train", step, pieces, results)
        reduction = self._reduction(is_last_of_window)

        def before_backward(microbatch: int) -> None:
            if self.streams is not None:
                number, data_rank = self._origin(microbatch)
                self.streams.begin_backward(self.steps, number, data_rank)
            if self.observer is not None:
                self.observer.before_backward(microbatch)

        schedule = self._schedule(self.schedule, len(pieces))
        parts = self.parts if self.check_is_due else None
        looking = nullcontext() if parts is None else parts.looking()
        with self._gradients_in_arena(), self._keep_generators(), looking:
            self.runtime.run(
                schedule,
                forward,
                backward,
                reduction=reduction,
                before_backward=before_backward,
                postponed=self.deferral,
            )
        if self.zero is not None:
            if reduction is None:
                self.zero.finish_forward()  # before the others are told of the step: some may have called more
            self._refuse_unlike_calls("train")
        if parts is not None:
            news = parts.news()
            if news and self.mesh.coordinate("data") == self.mesh.coordinate("tensor") == 0:
                tell_news(news, self.steps)
        outputs = [by_microbatch[index] for index in sorted(by_microbatch)]  # a schedule may have another order
        if len(set(by_tokens)) > 1:
            raise StepContractError("training_step returned num_valid_tokens for some microbatches only")
        self._fill_absent_logs(recorder)

        if by_tokens and by_tokens[0]:
            weigh_by_tokens(recorder, weights)
        loss_sum = weight_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        if losses:
            stacked = torch.stack(weights)
            weighted = torch.stack(losses).double() * stacked
            loss_sum, weight_sum = torch.where(stacked > 0, weighted, 0.0).sum(), stacked.sum()
        if losses:
            self._refuse_different(loss_sum, losses[0].dtype)
        tokens_flag = 1.0 if by_tokens and by_tokens[0] else 0.0
        shown = outputs if self.check_is_due else None
        report = self.exchange.exchange(recorder, loss_sum, weight_sum, flag + 2.0 * tokens_flag, mark, shown)
        self._tell_unlike(report, "train")
        window.by_tokens = any(f >= 2.0 for f in report.flags)
        report = replace(report, flags=tuple(f % 2.0 for f in report.flags))
        if not window.weight and window.by_tokens:
            # The first window guessed its unit from this rank's samples; from here on all ranks share one.
            window.unit = unit if self.zero is not None else self._token_unit or report.weight or unit
            self._token_unit = self._token_unit or report.weight or None
        window.weight += report.weight
        self.steps += 1

        window.trained.update(record.name for record in self.parameters)
        stash = [record.parameter.grad for record in parameters]
        for record, old in zip(parameters, kept):
            record.parameter.grad = old

        shares = dict(zip(by_microbatch, weights)) if losses else {}
        counts = (len(pieces), scale / unit)

        def install(incoming: Tensor) -> None:
            factor = float(incoming) / scale
            self._install(parameters, stash, factor, unit, report.weight, accumulate, is_last_of_window, shares, counts)

        value = torch.tensor(report.loss, dtype=self.loss_dtype, device=self.device)
        proxy = _HandOver.apply(self._anchor, value, install)
        if collect and outputs and self.mesh.has_loss and not self.sharing.is_even:
            outputs = self.sharing.collect(outputs, self._origins)
        elif outputs:
            sizes = [count for _, count in pieces[:counting]]
        self._origins = []
        output = joined(outputs, sizes)
        if share:
            output = from_last_stage(output, self.mesh, self.device)
        output = {**output, "loss": proxy} if isinstance(output, dict) else proxy
        return StepResult(output, report, samples)

    @torch.no_grad()
    def _install(
        self,
        parameters: Sequence[LogicalParameter],
        stash: list[Tensor | None],
        factor: float,
        unit: float,
        weight: float,
        accumulate: int,
        is_last: bool,
        shares: Mapping[int, Tensor],
        counts: tuple[int, float],
    ) -> None:
        """Move the stash into ``.grad``; at the window's end sum over the ranks and settle the scale.

        ``shares`` are the weights of this rank's losses by microbatch, and ``counts`` how many microbatches there were
        and what a weight of one was multiplied with: for who observes gradients.
        """
        window = self._window
        # Where the window's gradients arrive together at its end, the scale is settled there as well.
        if self._reduces_at_end:
            per_batch = 1.0
        elif window.by_tokens:
            per_batch = _exact(unit / window.unit)
        else:
            per_batch = _exact(factor * unit / (weight or unit))
        if self.observer is not None:
            held = [(record, local_tensor(gradient)) for record, gradient in zip(parameters, stash)]
            self.observer.end_batch(held, shares, *counts, per_batch)
        for record, gradient in zip(parameters, stash):
            if gradient is None:
                continue
            parameter = record.parameter
            if per_batch != 1.0:
                gradient.mul_(per_batch)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if not is_last:
            return
        final = 1.0
        if window.by_tokens:
            final = _exact(factor * accumulate * window.unit / (window.weight or window.unit))
        elif self._reduces_at_end:
            final = _exact(factor * unit / (weight or unit))
        if self.check_is_due:
            self._check_agreement()
        self._windows += 1
        self._reduce(final, window.trained)
        if self.observer is not None:
            self.observer.end_window(self._parameters, final)
        self._window = Window()

    def _refuse_different(self, loss: Tensor, dtype: torch.dtype) -> None:
        """Tensor ranks share their samples: when the check is due, their losses (0-dim float64) must be alike."""
        if self.check_is_due and losses_differ(loss, self.mesh, TOLERANCE.get(dtype, 1e-4)):
            raise StepContractError(
                f"the {self.mesh.size('tensor')} tensor ranks computed different losses for one batch: the sharding "
                "plan is wrong for this model, or its step draws random numbers that differ between ranks. See "
                "recipes/verify.py, or use sharding_plan='off'"
            )

    def _check_agreement(self) -> None:
        """Gradients of what the tensor ranks hold alike are alike, or are addends that are summed from now on.

        Raises:
            StepContractError: the same on every rank, for buffers that differ between tensor ranks.
        """
        unlike = unlike_buffers(self.buffers(), self.mesh) if self.is_cut else []
        if unlike:
            raise StepContractError(
                f"the buffers {', '.join(unlike[:4])} differ between tensor ranks, which share their samples. Either "
                "they are filled inside a sharded region, where each rank holds a part: fill them from a block's "
                "output, or keep the layers that they look at whole (sharding_plan={'their.name': 'replicate', ...}, "
                "or 'off'). Or they hold a figure of each rank, such as a time: keep that in a plain attribute"
            )
        found = undeclared_addends(self._parameters, self.mesh, self.working_dtype)
        if not found:
            return
        self._parameters = declared(self._parameters, found)
        self.reducer = GradientReducer(self._parameters, self.mesh)
        if self.mesh.rank == 0:
            shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            warnings.warn(
                f"the gradients of {shown} differ between tensor ranks: they are used inside a sharded region and are "
                "summed over the ranks from now on. Say so in the plan: style "
                "replicated_with_grad_allreduce",
                stacklevel=2,
            )

    # -- manual optimization -----------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a training step that optimizes by itself.

        Raises:
            StepContractError: at stage 3 of ZeRO, when data ranks have called different blocks.
        """
        if self.zero is None:
            yield
            return
        self.zero.begin_step(ahead=False)
        with self.explained():
            yield
        self.zero.finish_forward()
        self._refuse_unlike_calls("train")

    def backward_alone(self, backward: Callable[[], None], loss: Tensor, loss_scale: float = 1.0) -> None:
        """Run one backward of a step that optimizes by itself, and average its gradients over the data ranks.

        As under DDP, ``.grad`` is complete when it returns; what it held before is added, not reduced again.

        Args:
            backward: of the loss.
            loss: detached, of any shape, not scaled.
            loss_scale: by which ``backward`` scales the loss.

        Raises:
            StepContractError: when tensor ranks, which share their samples, have computed different losses.
        """
        self._refuse_switched()
        self._refuse_different(loss.double().sum(), loss.dtype)
        parameters = self.parameters
        kept = [record.parameter.grad for record in parameters]
        for record in parameters:
            record.parameter.grad = None
        if self.zero is None:
            backward()
        else:
            with self.explained():
                self.zero.whole_backward(backward)
            self._refuse_unlike_calls("train")
        if self.check_is_due:
            self._check_agreement()
        self._windows += 1
        self.reducer.reduce(1.0 / self.mesh.size("data") / loss_scale)
        for record, old in zip(parameters, kept):
            fresh = record.parameter.grad
            if old is not None:
                record.parameter.grad = old if fresh is None else old.add_(fresh)


def _exact(factor: float) -> float:
    """1 when a factor is 1 up to rounding of its own computation, so that gradients are not touched for nothing."""
    return 1.0 if abs(factor - 1.0) < 1e-12 else factor
