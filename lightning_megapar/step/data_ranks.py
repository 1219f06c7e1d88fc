"""What data ranks agree about before a step: units of weight, numbers of microbatches, when gradients are summed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_megapar.batches import copied
from lightning_megapar.data_parallel.reduction import ReduceEach, ReduceOnce, Reduction
from lightning_megapar.step.base import StepperBase, Window
from lightning_megapar.step.outcome import StepContractError


class DataRankSteps(StepperBase):
    """Steps of one rank beside other data ranks; see :class:`~lightning_megapar.step.base.StepperBase`."""

    @property
    def _reduces_at_end(self) -> bool:
        """Whether gradients arrive together at an accumulation window's end, already summed over the data ranks."""
        return self.zero is not None and self.zero.stage == 1

    @property
    def _counts_must_agree(self) -> bool:
        """Whether FSDP2's collectives follow the microbatches, so that data ranks must run equally many."""
        return self.zero is not None and self.zero.stage > 1 and self.num_microbatches > 1

    def _reduction(self, is_last: bool) -> Reduction | None:
        """What happens to gradients in the step that begins; ``is_last``: it is the last of its window."""
        if self.zero is None:
            return None
        self.zero.begin_step()  # what a rehearsal has called does not count
        whole = self._schedule(self.schedule, self.num_microbatches)
        if not self._reduces_at_end:
            return ReduceEach(self.zero, early=not whole.splits_backward, ends_window=is_last)
        if not is_last:
            return None
        order = tuple(whole.completions(self.mesh.coordinate("pipeline")))
        return ReduceOnce(self.zero, order, early=not whole.splits_backward)

    def _refuse_unlike_calls(self, kind: str) -> None:
        """At stage 3 every call of a block is a collective of the data ranks.

        Raises:
            StepContractError: the same on all of them.
        """
        if self.zero is not None and not self.zero.calls_were_alike:
            raise StepContractError(
                f"zero_stage=3: in {'training' if kind == 'train' else kind}_step data ranks called different blocks, "
                "or in another order, so that they gathered one block's parameters in place of another's. Valid "
                "values: zero_stage=0, 1 or 2, with which each data rank may call what it likes, or a step that calls "
                "the same blocks whatever its batch"
            )

    def _over_data_ranks(self, samples: int, pieces: int) -> tuple[int, int]:
        """Samples of all data ranks together, and the most microbatches that one has; collective over them."""
        group = self.mesh.group("data")
        if group is None:
            return samples, pieces
        # One sum tells both: how many ranks have as many microbatches as the position says.
        counts = torch.zeros(self.num_microbatches + 2, dtype=torch.int64)
        counts[0], counts[1 + pieces] = samples, 1
        counts = counts.to(self.device)
        dist.all_reduce(counts, group=group)
        total, *having = counts.tolist()
        return total, max(number for number, ranks in enumerate(having) if ranks)

    def _filled_up(self, pieces: list[tuple[Any, int]], most: int) -> list[tuple[Any, int]]:
        """As many microbatches as the longest data rank has: the last one is repeated, and does not count."""
        return pieces + [(copied(pieces[-1][0]), pieces[-1][1]) for _ in range(most - len(pieces))]

    def _unit(self, window: Window, samples: int, total: int) -> float:
        """The weight that counts as 1 while microbatch losses are scaled.

        Args:
            window: that the batch belongs to.
            samples: of this rank's batch.
            total: of the batches of all data ranks, where it is known.
        """
        if window.by_tokens:
            return window.unit
        if self._token_unit is None and self.zero is not None:
            # FSDP2 sums over the data ranks before the step's report tells how many samples the others had.
            return float(total)
        return self._token_unit or float(samples * self.mesh.size("data"))
