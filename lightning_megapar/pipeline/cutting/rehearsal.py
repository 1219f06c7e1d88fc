"""A dry pass before the first step of each kind: what every stage needs is found, what cannot work is refused.

The user's step runs forward over the stages on one microbatch, as often as something new is learnt (mostly once).
Values that are needed but do not travel yet are zeros there; the numbers of a rehearsal are thrown away, and so is
what it did to the module's state. Two things are looked for: results of earlier stages that reach something on a later
one (from then on they travel), and tensors that leave a block by another way than its return value (refused: on
another stage nobody would find them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megapar.pipeline.cutting.away import Away, Source, StageError
from lightning_megapar.pipeline.cutting.chunks import RankCut
from lightning_megapar.pipeline.cutting.cut import StageCut
from lightning_megapar.pipeline.cutting.state import state_kept
from lightning_megapar.pipeline.nest import tensors_of

ROUNDS = 8
"""Rehearsals until every stage has what it needs; each one reaches at least one module further."""


class FirstStepError(StageError):
    """Another stage's step raised in a rehearsal."""


@dataclass(frozen=True)
class Notes:
    """What one stage learnt in one rehearsal."""

    stage: int
    needs: frozenset[Source]
    copies: frozenset[str]
    changing: frozenset[str]
    escapes: frozenset[tuple[str, str, str]]
    error: str = ""


class Watch(TorchDispatchMode):
    """Sees tensors that are made in a module of the cut and used outside of it without having been returned."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.escapes: set[tuple[str, str, str]] = set()
        self._graph = torch.is_grad_enabled()
        self._inside: list[str] = []
        # Module, part of it, and a weak reference that keeps an address from being used for another storage.
        self._made: dict[int, tuple[str, str, StorageWeakRef]] = {}

    def enter(self, name: str) -> None:
        self._inside.append(name)

    def leave(self, output: Any) -> None:
        self._inside.pop()
        self.returned(output)

    def returned(self, output: Any) -> None:
        """These tensors are accounted for."""
        for tensor in _dense(tensors_of(output)):
            self._made.pop(StorageWeakRef(tensor.untyped_storage()).cdata, None)

    def part_returned(self, path: str, output: Any) -> None:
        """A part of the running module has returned something; the innermost part counts."""
        for tensor in _dense(tensors_of(output)):
            address = StorageWeakRef(tensor.untyped_storage()).cdata
            made = self._made.get(address)
            if made is not None and not made[1]:
                self._made[address] = (made[0], path, made[2])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside = self._inside[0] if self._inside else ""
        seen = set()
        for tensor in _dense(args, kwargs):
            address = StorageWeakRef(tensor.untyped_storage()).cdata
            seen.add(address)
            made = self._made.get(address)
            if made is None or made[0] == inside:
                continue
            # Without gradients a mask that a block keeps for the next one looks the same as an activation: only what a
            # part of a block returned counts then.
            if tensor.requires_grad or (not self._graph and made[1] and tensor.is_floating_point()):
                self.escapes.add((made[0], made[1], inside))
        output = func(*args, **kwargs)
        if inside:
            for tensor in _dense(output):
                reference = StorageWeakRef(tensor.untyped_storage())
                if reference.cdata not in seen:
                    self._made[reference.cdata] = (inside, "", reference)
        return output


def _dense(*nests: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(nests):
        if isinstance(leaf, Tensor) and not isinstance(leaf, Away) and leaf.layout == torch.strided:
            yield leaf


@contextmanager
def rehearsing(cut: StageCut) -> Iterator[None]:
    """Inside, the cut notes what is needed instead of stopping; afterwards :func:`notes_of` has it."""
    cut.ledger.recording = True
    cut.ledger.needs.clear()
    cut.ledger.copies.clear()
    cut.ledger.changing.clear()
    cut.watch = watch = Watch()

    def seen(path: str, module: nn.Module, args: Any, output: Any) -> None:
        watch.part_returned(path, output)

    handles = [
        part.register_forward_hook(partial(seen, path))
        for module in cut.local_modules.values()
        for path, part in module.named_modules()
        if path
    ]
    try:
        yield
    finally:
        cut.ledger.recording = False
        for handle in handles:
            handle.remove()


def notes_of(cut: StageCut, error: Exception | None = None) -> Notes:
    ledger, escapes = cut.ledger, cut.watch.escapes
    cut.watch = None
    text = "" if error is None else f"{type(error).__name__}: {error}"
    needs, copies, changing = frozenset(ledger.needs), frozenset(ledger.copies), frozenset(ledger.changing)
    return Notes(cut.stage, needs, copies, changing, frozenset(escapes), text)


def has_news(cut: StageCut) -> bool:
    """Whether this rehearsal has found anything so far that earlier ones had not."""
    ledger = cut.ledger
    unknown = any((source, cut.stage) not in cut.known for source in ledger.needs)
    return unknown or bool(ledger.copies - cut.copied or ledger.changing - cut.changing or cut.watch.escapes)


def learn(cut: StageCut, everybody: Sequence[Notes]) -> bool:
    """Take over what all stages need. Whether anything is new (to any stage), so that another rehearsal must follow.

    Raises:
        StageError: for what cannot be carried, and for an error of some stage when nothing new could mend it.
    """
    known, copied, changing = cut.known, cut.copied, cut.changing
    needs = frozenset((source, notes.stage) for notes in everybody for source in notes.needs)
    copies = {name for notes in everybody for name in notes.copies}
    changes = {name for notes in everybody for name in notes.changing}
    escapes = sorted({escape for notes in everybody for escape in notes.escapes})
    taps = frozenset(part for made, part, _ in escapes if made in cut.group and part) | cut.taps
    changed = not (needs <= known and copies <= copied and changes <= changing and taps <= cut.taps)
    if taps != cut.taps:
        cut.taps = taps
        cut.install_hooks()
    cut.known, cut.copied, cut.changing = known | needs, copied | copies, changing | changes
    cut.carried = {s for s, stage in cut.known if stage > cut.stage and cut.stage_of(s.unit) <= cut.stage}
    hidden = [(made, used) for made, part, used in escapes if made not in cut.group or not part]
    if hidden:
        made, used = hidden[0]
        where = f"in {used!r}" if used else "outside of the blocks"
        raise StageError(
            f"a tensor made in {made!r} is used {where} without having been returned by it (kept in an attribute, "
            "collected by a hook); on another pipeline stage it would be missing. Return it along "
            "with the hidden state, or use pipeline_parallel_size=1 for this module"
        )
    failed = [notes for notes in everybody if notes.error]
    if failed and not changed:
        raise FirstStepError(f"the first step failed on pipeline stage {failed[0].stage}: {failed[0].error}")
    return changed


class Rehearsal:
    """The rehearsals of one rank.

    Args:
        cut: this rank's.
        collectives: the step itself holds collectives (tensor parallelism, FSDP2). A rank that fails alone then leaves
            its peers inside of one, so that it must end at once instead of telling everybody.
    """

    def __init__(self, cut: RankCut, collectives: bool = False) -> None:
        self.cut = cut
        self.collectives = collectives
        self.error: Exception | None = None

    def forward(self, forward: Callable[[Any], tuple[bool, Any]], received: Any, chunk: int = 0) -> tuple[bool, Any]:
        """Run one forward; an error does not leave the next stages waiting, :meth:`run` raises it on every rank."""
        cut = self.cut.chunks[chunk]
        if received is not None and "failed" in received:
            return cut.is_last, received
        earlier = received is not None and "news" in received
        try:
            with cut.watch:
                finished, value = forward(received)
        except Exception as error:
            # What an earlier stage has only now learnt to send may be what is missing, on all peers alike.
            if self.collectives and not earlier and not has_news(cut):
                raise
            self.error = error
            return cut.is_last, {"failed": True}
        if not finished and (earlier or has_news(cut)):
            value["news"] = True
        return finished, value

    def run(self, once: Callable[[], None]) -> None:
        """Rehearse until nothing new is learnt. Collective over all ranks.

        Args:
            once: runs one microbatch forward over the stages, each by :meth:`forward`.

        Raises:
            StageError: on every rank, for what cannot be cut, with the remedy.
        """
        cuts = self.cut.chunks
        for _ in range(ROUNDS):
            self.error = None
            with ExitStack() as stack:
                stack.enter_context(state_kept(self.cut.module))
                for cut in cuts:
                    stack.enter_context(rehearsing(cut))
                once()
            gathered: list[Any] = [None] * dist.get_world_size()
            # Over all ranks: data ranks that take different branches must still rehearse equally often.
            dist.all_gather_object(gathered, [notes_of(cut, self.error) for cut in cuts])
            everybody = [notes for one in gathered for notes in one]
            try:
                news = [learn(cut, everybody) for cut in cuts]
            except FirstStepError:
                if self.error is not None:
                    raise self.error from None  # what somebody's step raised is what he should see
                raise
            if not any(news):
                return
        raise StageError(endless(cuts[-1]))


def endless(cut: StageCut) -> str:
    """The message when the needs of a step do not settle."""
    needed = ", ".join(sorted(s.describe() for s, _ in cut.known)[:5])
    return (
        f"after {ROUNDS} rehearsals on one microbatch a stage still needs more from earlier ones ({needed}, ...): the "
        "step differs from call to call (by what it counts), or needs what is found one "
        "by one. Use the same results in every call, or pipeline_parallel_size=1 for this module"
    )
