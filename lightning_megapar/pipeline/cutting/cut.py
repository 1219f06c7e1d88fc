"""Cut and inject: run somebody's own step on every stage of a pipeline.

The largest stack of blocks in the module (or the one that the user names) is cut. Each stage runs the *whole* user
step, once per microbatch, with these changes:

* a module of an earlier stage is a stand-in. The last block of the stage before returns what it returned there, so
  that whatever the step does between two blocks is done to it. Every other one returns :class:`Away` tensors (shapes
  without numbers), except for those results that this stage was found to need: they travel with the boundary, their
  gradients travel back;
* the stand-in of a block of a later stage raises a private ``BaseException`` that carries the boundary and unwinds the
  step; the last stage runs on to the loss;
* modules with parameters that run before the stack live on the first stage only, those that run after it on the last
  one. Modules without parameters stay everywhere.

The step must call every block once, in order. Parameters that more than one stage holds (tied embeddings, parameters
of a module that contains the stack) are reported by canonical name, so that their gradients can be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_megapar.generators import GeneratorStates, generator_states, set_generator_states
from lightning_megapar.pipeline.cutting import explain
from lightning_megapar.pipeline.cutting.away import Away, Ledger, Source, StageError, present
from lightning_megapar.pipeline.cutting.changes import Changed, apply_changes, changes, snapshot
from lightning_megapar.pipeline.cutting.entrance import (
    Boundary,
    Key,
    Result,
    StageExit,
    copy_of,
    may_draw,
    outgoing,
    presented,
    refuse_autograd_function,
    versions,
)
from lightning_megapar.pipeline.cutting.stages import StagePlan, find_stack, plan_stages
from lightning_megapar.pipeline.cutting.stand_ins import StandIn, put
from lightning_megapar.pipeline.nest import (
    map_leaves,
    replace,
    same,
    without_tensors,
)

__all__ = ["Boundary", "StageCut", "StageError", "StageExit", "StagePlan", "find_stack", "plan_stages"]


def children_of(module: nn.Module, plan: StagePlan) -> dict[str, nn.Module]:
    """The modules of a whole module that will live on one stage only, by dotted name."""
    return {name: module.get_submodule(name) for name in plan.stage_of()}


class StageCut:
    """One stage's share of a module, and the injection around each microbatch.

    Args:
        module: the whole module; cut in place, unless ``children`` are given.
        plan: from :func:`plan_stages`.
        stage: the stage; with several chunks on a rank a virtual one.
        device: where this rank computes.
        children: the modules that live on one stage only, by dotted name, of a module that other cuts share;
            :meth:`put_stand_ins` then cuts it.
        spares: what stand-ins are made from, where that is not ``children``.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        stage: int,
        device: torch.device | None = None,
        children: Mapping[str, nn.Module] | None = None,
        spares: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == len(plan.ranges) - 1
        self.start, self.stop = plan.ranges[stage]
        self.ledger = Ledger(device or torch.device("cpu"))
        self._carried: set[Source] = set()
        self._travelling: set[Key] = set()
        self.known: frozenset[tuple[Source, int]] = frozenset()
        """Which stage needs which result besides the one that is handed on; the same on all stages."""
        self.copied: set[str] = set()
        """Modules whose result the step modifies in place, although it also travels: the step gets a copy."""
        self.changing: set[str] = set()
        """Modules that change containers among their arguments (a dict that blocks share): the changes travel too."""
        self.taps: frozenset[str] = frozenset()
        """Parts of blocks (dotted, from the block) whose results leave the block by hooks: the hooks are replayed."""
        self.watch: Any = None
        self._stages = plan.stage_of()
        self._index = {name: i for i, name in enumerate(plan.blocks)}
        self.group = set(plan.blocks) | {name for group in plan.beside for name in group}
        self._active = False
        self._handles: list[Any] = []
        self._drawing: set[str] = set()
        self._local: dict[str, nn.Module] = {}
        self._stand_ins: dict[str, StandIn] = {}
        self._clear()
        whole = children_of(module, plan) if children is None else children
        self._divide(whole, whole if spares is None else spares)
        if children is None:
            self.put_stand_ins(self._stand_ins)

    # -- cutting -----------------------------------------------------------------------------------------------------

    def _divide(self, children: Mapping[str, nn.Module], spares: Mapping[str, nn.Module]) -> None:
        for name, stage in self._stages.items():
            if stage == self.stage:
                self._local[name] = children[name]
            else:
                answer = partial(self._answer, name)
                self._stand_ins[name] = StandIn(name, spares[name], self.ledger, answer, self.is_running)

    def put_stand_ins(self, names: Iterable[str]) -> list[tuple[nn.Module, str, nn.Module]]:
        """Put stand-ins for modules of other stages into the module.

        Args:
            names: dotted names of the modules.

        Returns:
            owner, name in it and what stood there, for whoever puts it back.
        """
        taken = []
        for name in names:
            owner_path, _, child_name = name.rpartition(".")
            owner, stand_in = self.module.get_submodule(owner_path), self._stand_ins[name]
            before: Any = owner._modules[child_name]
            if before is not stand_in:
                taken.append((owner, child_name, before))
                put(owner, child_name, stand_in, before.training)
        return taken

    @property
    def carried(self) -> set[Source]:
        """Results that travel to the next stage besides the one that is handed on."""
        return self._carried

    @carried.setter
    def carried(self, sources: set[Source]) -> None:
        self._carried = set(sources)
        self._travelling = {(s.unit, s.call) for s in sources}

    def is_running(self) -> bool:
        return self._active

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def install_hooks(self) -> None:
        """Attach injection and capture. Call it after anything else (FSDP2) has put hooks on the modules."""
        self.remove_hooks()
        self._drawing = set()
        names: dict[int, list[str]] = {}
        for name, module in self._local.items():
            names.setdefault(id(module), []).append(name)
        for name, module in self._local.items():
            mine = names[id(module)]
            if mine[0] != name:
                continue  # one module in several places
            # Blocks are seeded one by one; states of the generators cost more than a small module's forward.
            if name not in self._index and may_draw(module):
                self._drawing.update(mine)
            # First of all, so that everybody else's hooks see numbers; and last of all.
            self._handles.append(
                module.register_forward_pre_hook(partial(self._before, mine), with_kwargs=True, prepend=True)
            )
            self._handles.append(module.register_forward_hook(partial(self._after, mine)))
            for path, part in self._tapped(name, module):
                self._handles.append(part.register_forward_hook(partial(self._tap, f"{name}.{path}")))

    def _tapped(self, name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        if not self.taps or name not in self.group:
            return []
        return [(path, part) for path, part in module.named_modules() if path in self.taps]

    def stage_of(self, name: str) -> int:
        """Stage of a module of the cut, or of a part of one."""
        while name not in self._stages:
            name = name.rpartition(".")[0]
        return self._stages[name]

    @property
    def stand_ins(self) -> dict[str, StandIn]:
        """What stands for the modules of other stages, by dotted name."""
        return dict(self._stand_ins)

    @property
    def local_modules(self) -> dict[str, nn.Module]:
        """Modules that live on this stage only, by dotted name."""
        return dict(self._local)

    # -- while the step runs -----------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._results: dict[Key, Result] = {}
        self._received: Boundary | None = None
        self._usual: Any = None
        self._handed: Key | None = None
        self._calls: dict[str, int] = {}
        self._arguments: list[Any] = []
        self._drawn: list[GeneratorStates] = []
        self._generators: dict[Key, GeneratorStates] = {}
        self._next = 0

    def _count(self, name: str) -> Key:
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        return name, number

    def _in_order(self, name: str) -> None:
        index = self._index.get(name)
        if index is None:
            return
        if index == 0 and self._next > 0:
            raise StageError(explain.called_twice(self.plan.stack))
        if index < self._next:
            raise StageError(explain.called_late(self.plan.stack, index))
        self._next = index + 1

    def _before(self, names: list[str], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._active:
            return None
        name = self._place(names)
        self._in_order(name)
        if self.ledger.recording:
            refuse_autograd_function(name)
        if self.watch is not None or name in self.changing:
            self._arguments.append(snapshot(args, kwargs))
        if name in self._drawing:
            self._drawn.append(generator_states())
        if self.watch is not None:
            self.watch.enter(name)
        return replace(Away, present, args), replace(Away, present, kwargs)

    def _place(self, names: list[str]) -> str:
        """Which of its places a module is called for: each one in turn, then the last again."""
        return next((name for name in names if name not in self._calls), names[-1])

    def _after(self, names: list[str], module: nn.Module, args: Any, output: Any) -> Any:
        if not self._active:
            return None
        name = self._place(names)
        # Absent values that came in by another way than the arguments.
        output = replace(Away, present, output)
        value = output
        if self.watch is not None or name in self.changing:
            found = changes(self._arguments.pop())
            if found:
                value = Changed(output, found)
                self.ledger.changing.add(name)
        if self.watch is not None:
            self.watch.leave(value)
        key = self._count(name)
        self._results[key] = Result(value, versions(value))
        if name in self._drawing:
            states = generator_states()
            if states != self._drawn.pop():
                self._generators[key] = states
        if name in self.group:
            self._handed = key
        return map_leaves(copy_of, output) if name in self.copied else output

    def _tap(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._active:
            return
        if self.watch is not None:
            self.watch.returned(output)
        self._results[self._count(name)] = Result(output, versions(output))

    def _answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of another stage returns to the step."""
        if not self._active:
            block = f"block {self._index.get(name)} of the pipelined stack {self.plan.stack!r}"
            raise StageError(explain.not_running(block if name in self._index else f"module {name!r}"))
        if self._stages[name] > self.stage:
            if name not in self.group:
                raise StageError(explain.called_too_early(name, self.plan.stack, self._next - 1, len(self._index)))
            self._in_order(name)
            raise StageExit(self._boundary())
        self._in_order(name)
        key = self._count(name)
        assert self._received is not None
        result = self._received["results"].get(key)
        if result is None:
            if name not in self._index:
                raise StageError(explain.called_too_late(name, self._stages[name]))
            result = self._usual
        for part, path in [
            (k, k[0][len(name) + 1 :]) for k in self._received["results"] if k[0].startswith(f"{name}.")
        ]:
            if path in self.taps:
                replayed: Any = self._stand_ins[name].get_submodule(path)
                replayed.replay(self._present(part, self._received["results"][part]))
        states = self._generators.get(key)
        if states is not None:
            set_generator_states(states)  # draws after this module are the same on all stages
        result = self._present(key, result)
        if isinstance(result, Changed):
            apply_changes(result.changes, args, kwargs)
            return result.returned
        return result

    def _present(self, key: Key, result: Any) -> Any:
        return presented(key, result, self.ledger, copied=key[0] in self.copied)

    def _boundary(self) -> Boundary:
        """What the next stage gets."""
        handed = self._handed
        if handed is None:
            raise StageError(explain.left_out(self.plan.stack, self.stop - 1))
        results: dict[Key, Any] = {}
        for key, result in self._results.items():
            if (key == handed or key in self._travelling) and versions(result.value) != result.versions:
                self._modified(key[0])
            carried = None if key == handed else self._carried
            results[key] = outgoing(key, result.value, carried)
        # Most blocks return alike: those that do not travel are not described one by one.
        usual = without_tensors(results[handed])
        if self._usual is not None and not same(self._usual, usual):
            for name in self.plan.blocks[: self.start]:
                results.setdefault((name, 0), self._usual)
        return {
            "handed": handed,
            "generators": self._generators,
            "results": {
                k: v for k, v in results.items() if k == handed or k[0] not in self._index or not same(v, usual)
            },
        }

    def _modified(self, name: str) -> None:
        if self.ledger.recording:
            self.ledger.copies.add(name)
            return
        raise StageError(explain.modified(name))

    @contextmanager
    def microbatch(self, received: Boundary | None) -> Iterator[None]:
        """While active, the step's stack is this stage's share. ``received`` is the previous stage's boundary."""
        self._clear()
        self._received = received
        if received is not None:
            self._usual = without_tensors(received["results"][received["handed"]])
            self._handed = received["handed"]
            self._generators = dict(received["generators"])
            self._results = {key: Result(value, versions(value)) for key, value in received["results"].items()}
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._clear()

    def call(self, step: Callable[[], Any], received: Boundary | None) -> tuple[bool, Any]:
        """Run the user's step for one microbatch.

        Returns:
            ``(True, step's return value)`` on the last stage, ``(False, boundary)`` elsewhere.

        Raises:
            StageError: when a stage before the last ran to the end of the step (the stack was not called), when the
                last stage did not call all of its blocks, or when something is needed that does not travel.
        """
        with self.microbatch(received):
            try:
                output = step()
            except StageExit as leaving:
                return False, leaving.boundary
            if not self.is_last or self._next == 0:
                raise StageError(explain.never_called(self.plan.stack))
            return True, replace(Away, present, output)
