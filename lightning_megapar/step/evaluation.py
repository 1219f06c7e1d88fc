"""One validation, test or predict step as a pipeline of microbatches, forward only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from lightning_megapar.batches import batch_size_of, detach, join_outputs, split_batch
from lightning_megapar.step.base import StepResult
from lightning_megapar.step.data_ranks import DataRankSteps
from lightning_megapar.step.log import LogRecorder
from lightning_megapar.step.outcome import weigh_by_tokens
from lightning_megapar.step.stage_metrics import from_last_stage
from lightning_megapar.step.tokens import ENTRY, tokens_in


class Evaluation(DataRankSteps):
    """Evaluates on one rank; see :class:`~lightning_megapar.step.base.StepperBase` for its arguments."""

    def evaluate(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        results: Any,
        flag: float = 0.0,
        share: bool = False,
        nominal: int | None = None,
        kind: str = "evaluate",
    ) -> StepResult:
        """Run one validation, test or predict batch forward only.

        Returns:
            the microbatches' outputs joined; without ``share`` on the last stage only, ``None`` elsewhere.
        """
        if self.zero is not None:
            self.zero.begin_step()
        pieces = split_batch(batch, self.num_microbatches, nominal)
        mark = self._fingerprint(batch, len(pieces), "evaluate")
        self._rehearse(kind, step, pieces, results)
        counting = len(pieces)
        if self.zero is not None and self.zero.stage == 3 and self.num_microbatches > 1:
            pieces = self._filled_up(pieces, self._over_data_ranks(0, counting)[1])
        recorder = LogRecorder()
        outputs: list[Any] = []
        weights: list[Tensor] = []
        by_tokens: list[bool] = []

        def forward(chunk: int, microbatch: int, received: Any) -> tuple[bool, Any]:
            piece, count = pieces[microbatch]
            does_not_count = microbatch >= counting
            log = LogRecorder() if does_not_count else self._recorder_of(chunk, recorder)
            log.begin_microbatch(microbatch, count)
            with self.state_kept() if does_not_count else nullcontext(), log.attached(results):
                finished, value = self._call(lambda: step(piece), microbatch, received, chunk)
            if finished and not does_not_count:
                outputs.append(detach(value))
                tokens = value.get(ENTRY) if isinstance(value, dict) else None
                if tokens is None and kind in ("validation", "test"):
                    tokens = tokens_in(piece, count, self.count_tokens)
                by_tokens.append(tokens is not None)
                weights.append(self._weight(count, tokens))
            return finished, value

        with self._keep_generators():
            self.runtime.run(self._schedule("forward", len(pieces)), forward)
        if self.zero is not None:
            self.zero.finish_forward()
            self._refuse_unlike_calls(kind)
        self._fill_absent_logs(recorder)
        if by_tokens and all(by_tokens):
            weigh_by_tokens(recorder, weights)
        report = self.exchange.exchange(recorder, 0.0, 0.0, flag, mark, outputs)
        self._tell_unlike(report, kind)
        output = join_outputs(outputs, [count for _, count in pieces[:counting]]) if outputs else None
        if share and self.cut is not None:
            output = from_last_stage(output, self.mesh, self.device)
        return StepResult(output, report, batch_size_of(batch) or 1)
