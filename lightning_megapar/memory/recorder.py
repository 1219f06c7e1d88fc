"""Records one training step for a :class:`~lightning_megapar.memory.timeline.Timeline`.

Hooks say in the profile where blocks begin and end, and which addresses are whose; they read tensors' addresses alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.meter import quiet_profiler
from lightning_megapar.memory.saved import plain_tensors
from lightning_megapar.memory.timeline import GRADIENTS, MARK, PARAMETERS, Timeline, timeline_of


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors on a device; of a DTensor its local part. Shared memory is there
    once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for part in plain_tensors(tensor):
            storage = part.untyped_storage()
            if part.device.type == device.type and storage.nbytes() and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found


class StepRecorder:
    """Records one step of a rank, from :meth:`start` to :meth:`stop`.

    Args:
        device: whose memory.
        blocks: name -> block, for activations by layer. Compiled ones are left alone, and count as outside.
        known: tensors that are there, by category.
        leaves: tensors whose gradients are noted as they arrive.
        shown: parameters that may show another memory within a step than between two (``bf16-true``).

    Raises:
        ConfigError: on :meth:`start`, when another profiler is running.
    """

    def __init__(
        self,
        device: torch.device,
        blocks: Mapping[str, nn.Module],
        known: Mapping[str, Sequence[Tensor]],
        leaves: Iterable[Tensor] = (),
        shown: Iterable[Tensor] = (),
    ) -> None:
        self._device = device
        self._blocks, self._leaves, self._shown = blocks, tuple(leaves), tuple(shown)
        self._first = next(iter(blocks), "")
        self._held = {
            pointer: (size, category)
            for category, tensors in known.items()
            for pointer, size in storages(tensors, device).items()
        }
        # The profiler does not see the end of what was there before it.
        self._going = {
            part.untyped_storage().data_ptr(): StorageWeakRef(part.untyped_storage())
            for tensor in known.get(GRADIENTS, ())
            for part in plain_tensors(tensor)
        }
        self._handles: list[Any] = []
        self._profile: profile | None = None
        self._quiet = ExitStack()

    def start(self) -> None:
        """Begin."""
        if torch.autograd._profiler_enabled():
            raise ConfigError(
                "memory is recorded with torch's profiler, and another one is running (Trainer(profiler=...), "
                "torch.profiler.profile); let it end before, or leave one of the two out"
            )
        for name, block in self._blocks.items():
            if block._compiled_call_impl is None:
                self._handles.append(block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                self._handles.append(block.register_forward_hook(self._leave, always_call=True))
        for leaf in self._leaves:
            if leaf.requires_grad and leaf.is_leaf:
                self._handles.append(leaf.register_post_accumulate_grad_hook(self._arrived))
        # It warns within the step as well.
        self._quiet.enter_context(quiet_profiler())
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def note(self, category: str, tensors: Iterable[Tensor]) -> None:
        """These tensors, which are there now, are of a category."""
        self._mark("known", category, storages(tensors, self._device))

    def stop(self) -> Timeline:
        """End, and say what was held."""
        recorded = self.abandon()
        assert recorded is not None
        return timeline_of(recorded, self._held, self._device.type)

    def abandon(self) -> profile | None:
        """End without a word."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        self._quiet.close()
        return recorded

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if name == self._first:
            self.note(PARAMETERS, self._shown)
        self._mark("enter", name, self._with_gradients((*args, *kwargs.values())))

    def _leave(self, _: nn.Module, args: Any, output: Any) -> None:
        self._mark("leave", "", self._with_gradients(output if isinstance(output, list | tuple) else (output,)))

    def _with_gradients(self, values: Iterable[Any]) -> dict[int, int]:
        tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        return storages(tensors, self._device)

    def _arrived(self, leaf: Tensor) -> None:
        if leaf.grad is not None:
            self.note(GRADIENTS, [leaf.grad])

    def _mark(self, kind: str, name: str = "", pointers: Iterable[int] = ()) -> None:
        gone = [pointer for pointer, storage in self._going.items() if storage.expired()]
        if gone:
            for pointer in gone:
                del self._going[pointer]
            self._mark("gone", "", gone)
        with record_function(f"{MARK}{kind}\t{name}\t{' '.join(map(str, pointers))}"):
            pass


@contextmanager
def recorded_step(
    device: torch.device,
    blocks: Mapping[str, nn.Module],
    known: Mapping[str, Sequence[Tensor]],
    leaves: Iterable[Tensor] = (),
) -> Iterator[list[Timeline]]:
    """Record what the body does; the list has the timeline behind it. Arguments as for :class:`StepRecorder`."""
    recorder, found = StepRecorder(device, blocks, known, leaves), list[Timeline]()
    del known  # or gradients would live on
    recorder.start()
    try:
        yield found
        found.append(recorder.stop())
    finally:
        recorder.abandon()
