"""Where one run of a user's step uses each module: before, inside or after the stack of blocks.

The step runs once on the whole module, before it is cut: on a copy without numbers (the meta device: no memory, no
time), else with numbers where there are any. What is used is seen from the parameters and buffers that operations
read, so that a weight read without calling its module counts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from lightning_megapar.pipeline.cutting.state import state_kept

BEFORE, INSIDE, AFTER = "before", "inside", "after"


@dataclass(frozen=True)
class Survey:
    """What a run of the step showed. The same on every rank (the first rank's counts).

    Args:
        uses: dotted name of a module beside the blocks, or of a part of one -> when it was used (``before``,
            ``inside``, ``after``).
        called: those of them that were called by something else than another one of them.
        calls: indices of the blocks, in the order in which they were called.
        complete: whether the step ran to its end.
        block_flops: floating-point operations of each block's forward, as torch counts them.
        flops_before, flops_after: of what ran before the first block and after the last one.
    """

    uses: Mapping[str, frozenset[str]]
    called: frozenset[str]
    calls: tuple[int, ...]
    complete: bool = True
    block_flops: tuple[float, ...] = ()
    flops_before: float = 0.0
    flops_after: float = 0.0

    def place(self, name: str) -> str | None:
        """``"first"``, ``"last"`` or ``"all"`` for a module beside the stack; ``None`` when it was not used."""
        uses = self.uses.get(name, frozenset())
        if not uses:
            return None
        if len(uses) > 1 or INSIDE in uses:
            return "all"
        return "first" if BEFORE in uses else "last"


class _Record(TorchDispatchMode):
    """Notes which of the given storages are read, and when."""

    supports_higher_order_operators = True

    def __init__(self, owners: Mapping[int, frozenset[str]]) -> None:
        super().__init__()
        self.owners = owners
        self.time = 0
        self.calls: list[int] = []
        self.block_times: list[int] = []
        self.events: list[tuple[int, str]] = []
        self.running: list[str] = []
        self.inside: list[int] = []
        self.block_flops: dict[int, float] = {}
        self.other_flops: list[tuple[int, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.time += 1
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                names = self.owners.get(_address(leaf))
                if names:
                    # A tied value belongs to whichever of its modules is running, else to all of them.
                    now = [name for name in self.running if name in names]
                    self.events += [(self.time, name) for name in now[-1:] or names]
        output = func(*args, **(kwargs or {}))
        self._count(func, args, kwargs or {}, output)
        return output

    def _count(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is None:
            return
        count = float(formula(*args, **kwargs, out_val=output))
        if self.inside:
            self.block_flops[self.inside[-1]] = self.block_flops.get(self.inside[-1], 0.0) + count
        else:
            self.other_flops.append((self.time, count))


def _address(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


def observe(module: nn.Module, run: Callable[[], Any], blocks: Sequence[str], names: Iterable[str]) -> Survey | None:
    """Run a step and see when it uses what.

    Args:
        module: the whole module (or a copy of it without numbers).
        run: runs the step once.
        blocks: dotted names of the blocks, in order.
        names: dotted names of the modules to place.

    Returns:
        ``None`` when the run failed before it had called the blocks.
    """
    roots = list(names)
    parts = {
        f"{root}.{path}" if path else root: child
        for root in roots
        for path, child in module.get_submodule(root).named_modules()
    }
    owners: dict[int, set[str]] = {}
    for name, child in parts.items():
        for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
            owners.setdefault(_address(tensor), set()).add(name)
    record = _Record({address: frozenset(found) for address, found in owners.items()})
    handles = []
    called: set[str] = set()

    def enter_block(places: Sequence[int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            record.time += 1
            # One module in several places is called for each of them in turn.
            record.calls.append(next((i for i in places if i not in record.calls), places[0]))
            record.inside.append(record.calls[-1])
            record.block_times.append(record.time)

        return hook

    def leave_block(*_: Any) -> None:
        record.time += 1
        record.inside.pop()
        record.block_times.append(record.time)

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            record.time += 1
            if not record.running:
                called.add(name)
            record.running.append(name)
            record.events.append((record.time, name))

        return hook

    def leave(*_: Any) -> None:
        if record.running:
            record.running.pop()

    places: dict[nn.Module, list[int]] = {}
    for index, name in enumerate(blocks):
        places.setdefault(module.get_submodule(name), []).append(index)
    for block, found in places.items():
        handles += [block.register_forward_pre_hook(enter_block(found)), block.register_forward_hook(leave_block)]
    for name, child in parts.items():
        handles += [child.register_forward_pre_hook(enter(name)), child.register_forward_hook(leave)]
    complete = True
    try:
        with torch.no_grad(), record:
            run()
    except Exception:  # whatever somebody's step raises without numbers: then this run says less
        complete = False
    finally:
        for handle in handles:
            handle.remove()
    if not complete and len(set(record.calls)) < len(blocks):
        return None
    uses: dict[str, set[str]] = {name: set() for name in parts}
    first = min(record.block_times, default=0)
    last = max(record.block_times, default=0)
    for time, name in record.events:
        when = BEFORE if time < first else AFTER if time > last else INSIDE
        while name:
            uses.setdefault(name, set()).add(when)
            name = name.rpartition(".")[0]
    return Survey(
        {name: frozenset(when) for name, when in uses.items()},
        frozenset(called),
        tuple(record.calls),
        complete,
        tuple(record.block_flops.get(index, 0.0) for index in range(len(blocks))),
        sum(count for time, count in record.other_flops if time < first),
        sum(count for time, count in record.other_flops if time > last),
    )


WITH_NUMBERS = 300_000_000
"""Parameters up to which a step that cannot run without numbers is run with them (on the CPU)."""


def survey_module(
    module: nn.Module,
    trial: Callable[[nn.Module], Any],
    blocks: Sequence[str],
    names: Iterable[str],
    convert: Callable[[nn.Module], nn.Module] = lambda m: m,
) -> Survey | None:
    """Run ``trial`` on a copy without numbers, and where that does not get through, on the module itself.

    Args:
        module: the whole module; its buffers and attributes are afterwards what they were.
        trial: runs one step on a module.
        blocks, names: see :func:`observe`.
        convert: what the precision does to a module.

    Returns:
        ``None`` when neither run got through the blocks.
    """
    names = list(names)
    try:
        with state_kept(module):  # the copy has the module's own objects in its attributes
            empty = without_numbers(module)
            convert(empty)
            found = observe(empty, lambda: trial(empty), blocks, names)
    except Exception:  # a class that cannot be copied this way
        found = None
    if found is not None and found.complete:
        return found
    parameters = list(module.parameters())
    if any(p.is_meta for p in parameters) or sum(p.numel() for p in parameters) > WITH_NUMBERS:
        return found
    with state_kept(module):
        whole = observe(module, lambda: trial(module), blocks, names)
    return whole if whole is not None and (whole.complete or found is None) else found


def without_numbers(module: nn.Module) -> Any:
    """A copy of a module on the meta device: same classes and attributes, no storage, shared parameters shared."""
    made: dict[int, Any] = {}

    def tensor(value: Any) -> Any:
        if value is None:
            return None
        if id(value) not in made:
            empty = torch.empty_like(value, device="meta", requires_grad=False)
            if isinstance(value, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=value.requires_grad)
            made[id(value)] = (empty, value)
        return made[id(value)][0]

    def leaf(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copied(value)
        return tensor(value) if isinstance(value, Tensor) else value

    def copied(original: nn.Module) -> Any:
        if id(original) in made:
            return made[id(original)][0]
        new: Any = object.__new__(type(original))
        made[id(original)] = (new, original)
        own = dict(vars(original))
        own["_parameters"] = {k: tensor(v) for k, v in original._parameters.items()}
        own["_buffers"] = {k: tensor(v) for k, v in original._buffers.items()}
        own["_modules"] = {k: None if v is None else copied(v) for k, v in original._modules.items()}
        for key, value in vars(original).items():
            if key.endswith(("_hooks", "_hooks_with_kwargs")):
                own[key] = type(value)(value) if isinstance(value, dict) else value
            elif key not in own or key in ("_parameters", "_buffers", "_modules"):
                continue
            elif any(isinstance(x, (Tensor, nn.Module)) for x in tree_leaves(value)):
                own[key] = tree_map(leaf, value)
            elif type(value) in (list, dict, set):
                own[key] = type(value)(value)
        new.__dict__.update(own)
        return new

    return copied(module)
