"""How a block of the stack keeps its activations: everything, all but attention, results of products, or its inputs.

:func:`choose_for` puts a :class:`BlockForward` in the place of a block's ``forward``, inside of the hooks on it: those
of FSDP2, of the pipeline and of the user run once for each call, whatever is recomputed. A block that is compiled
is recomputed around the compiled call, with its hooks.

``"no_attention"`` recomputes what attention makes of queries, keys and values, which is large and cheap (Korthikanti et
al., arXiv 2205.05198, "selective"): modules that say so by ``is_core_attention = True``, as
:class:`~lightning_megapar.layers.attention.CoreAttention` does; else calls of torch's
``scaled_dot_product_attention``; else, where a block makes none, its modules named after attention as a whole.
``"products"`` keeps what :mod:`lightning_megapar.memory.products` says, ``"inputs"`` nothing but the block's arguments;
``"offload"`` recomputes nothing and keeps everything in host memory (:mod:`lightning_megapar.memory.offload`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_megapar.config import ConfigError
from lightning_megapar.memory.arena import Arena
from lightning_megapar.memory.kernels import allowed_kernels, attention_kernels
from lightning_megapar.memory.offload import OffloadSaved
from lightning_megapar.memory.products import Checking, products_kept
from lightning_megapar.memory.rerun import Rerun

ALL, NO_ATTENTION, PRODUCTS, INPUTS, OFFLOAD = "all", "no_attention", "products", "inputs", "offload"
OPTIONS = (ALL, NO_ATTENTION, PRODUCTS, INPUTS, OFFLOAD)
"""From most bytes kept on the device to fewest."""


class BlockForward:
    """A block's ``forward`` under one of :data:`OPTIONS`. It moves, copies and pickles with the block.

    Args:
        block: whose.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.option = ALL
        self.measure: Callable[[BlockForward, tuple[Any, ...], dict[str, Any]], None] | None = None
        """Is called before the next call with gradients, with this and the call's arguments, and is ``None`` then."""
        self.offload: OffloadSaved | None = None
        """Moves what is kept to the host; shared by the blocks of a rank."""
        self.place = 0
        """The block's number among those."""
        self.arena: Arena | None = None
        """Where kept inputs come from, when there is one."""
        self.calls = 0
        """Calls with gradients, since somebody has set it to 0."""
        self.most_elements = 0
        """Most elements of the tensors among a call's arguments, likewise."""
        self._inner: Any = vars(block).get("forward")
        self._compiled: Any = block._compiled_call_impl
        self._rerun = Rerun(block)
        self._was_called = False
        self._keeps_products = False
        """Whether results of products are known to stay as they are."""
        self._parts = _core_attentions(block)
        self._looks = not self._parts and not self.is_compiled
        """Whether calls of torch's attention are looked for."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of another module, and of another rank perhaps.
        return {**vars(self), "offload": None, "arena": None, "measure": None}

    @property
    def is_compiled(self) -> bool:
        """Whether the block is compiled as a whole."""
        return is_compiled(self.block)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._inner or type(self.block).forward.__get__(self.block))

    def options(self) -> tuple[str, ...]:
        """Those that differ for this block, as far as is known before it has been called."""
        if self.is_compiled:
            return (ALL, INPUTS, OFFLOAD)
        return OPTIONS if self._parts or self._looks else (ALL, PRODUCTS, INPUTS, OFFLOAD)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward."""
        if self._compiled is not None:
            return self._compiled(*args, **kwargs)
        return self._own(*args, **kwargs)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        return (
            type(self.block).forward(self.block, *args, **kwargs)
            if self._inner is None
            else self._inner(*args, **kwargs)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.calls += 1
            self.most_elements = max(self.most_elements, elements_of(args, kwargs))
            if self.measure is not None:
                measure, self.measure = self.measure, None
                measure(self, args, kwargs)
        return self.run(self.option, args, kwargs)

    def run(self, option: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's result, with a graph that keeps what an option keeps."""
        if option == ALL or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if self.is_compiled and not self._was_called:
            # What a first call makes (tables, caches) leads to other code in the second, and other saved tensors.
            self._was_called = True
            return self.plain(*args, **kwargs)
        if option == OFFLOAD:
            self.offload = self.offload or OffloadSaved(self.block)
            with self.offload.block(self.place, module=self.block):
                return self.plain(*args, **kwargs)
        if option == PRODUCTS and not self._keeps_products:
            self._rerun.learn(self.plain, args, kwargs, Checking)
            self._keeps_products = True
        if option in (INPUTS, PRODUCTS):
            contexts = products_kept if option == PRODUCTS else noop_context_fn
            return self._rerun(self.plain, args, kwargs, contexts, self.arena)
        if not self._looks:
            with _recomputed(self._parts):
                return self.plain(*args, **kwargs)
        seen = _AttentionCalls()
        with seen:
            output = self.plain(*args, **kwargs)
        if not seen.number:
            # What is kept by this call is right all the same, only more.
            self._looks, self._parts = False, _named_attentions(self.block)
        return output

    def install(self) -> None:
        """Take the place of the block's forward."""
        if self._compiled is not None:
            self.block._compiled_call_impl = self  # type: ignore[assignment]
        else:
            vars(self.block)["forward"] = self

    def remove(self) -> None:
        """Give the block its own forward back."""
        if self._compiled is not None:
            self.block._compiled_call_impl = self._compiled
        elif self._inner is None:
            vars(self.block).pop("forward", None)
        else:
            vars(self.block)["forward"] = self._inner


def elements_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Elements of the tensors among arguments."""
    return sum(value.numel() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


class _AttentionCalls(TorchFunctionMode):
    """Inside, results of torch's attention are recomputed from queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        self.number += 1
        kernels = attention_kernels()

        def attend(*given: Any, **named: Any) -> Any:
            with allowed_kernels(kernels):
                return func(*given, **named)

        return checkpoint(attend, *args, use_reentrant=False, **kwargs)


@contextmanager
def _recomputed(parts: Sequence[Rerun]) -> Iterator[None]:
    """Inside, calls of these modules are recomputed from their arguments."""
    before = []
    for rerun in parts:
        own = vars(rerun.module)
        before.append((own, own.get("forward")))
        forward = own.get("forward") or partial(type(rerun.module).forward, rerun.module)
        own["forward"] = partial(_forward, rerun, forward)
    try:
        yield
    finally:
        for own, inner in reversed(before):
            if inner is None:
                del own["forward"]
            else:
                own["forward"] = inner


def _forward(rerun: Rerun, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return rerun(forward, args, kwargs)


def _core_attentions(block: nn.Module) -> list[Rerun]:
    return [Rerun(part) for part in _outermost(block, lambda part: bool(getattr(part, "is_core_attention", False)))]


def _named_attentions(block: nn.Module) -> list[Rerun]:
    return [Rerun(part) for part in _outermost(block, _sounds_like_attention)]


def _sounds_like_attention(part: nn.Module) -> bool:
    name = type(part).__name__.lower()
    return ("attention" in name or "attn" in name) and not isinstance(part, nn.ModuleList | nn.ModuleDict)


def _outermost(block: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Parts of a block that are wanted, without those inside of another one; the block itself is none."""
    found: dict[int, nn.Module] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if wanted(child):
                found[id(child)] = child
            else:
                walk(child)

    walk(block)
    return list(found.values())


def forward_of(block: nn.Module) -> BlockForward | None:
    """What stands for a block's forward, if something does."""
    stands = block._compiled_call_impl if isinstance(block._compiled_call_impl, BlockForward) else None
    stands = stands or vars(block).get("forward")
    return stands if isinstance(stands, BlockForward) else None


def is_compiled(block: nn.Module) -> bool:
    """Whether a block is compiled as a whole, by its own method or by ``torch.compile``."""
    return block._compiled_call_impl is not None or hasattr(block, "_orig_mod")


def refuse_option(name: str, block: nn.Module, option: str) -> None:
    """What cannot be recomputed.

    Raises:
        ConfigError: a block that recomputes itself already (transformers' ``gradient_checkpointing``), or an option
            that a compiled block cannot have.
    """
    if getattr(block, "gradient_checkpointing", False) is True and option != ALL:
        raise ConfigError(
            f"recompute: block {name!r} recomputes itself already (gradient_checkpointing=True); call "
            "model.gradient_checkpointing_disable(), or use recompute='none'"
        )
    if option in (NO_ATTENTION, PRODUCTS) and is_compiled(block):
        mode = "'selective'" if option == NO_ATTENTION else "{'options': ['products']}"
        raise ConfigError(
            f"recompute={mode}: block {name!r} is compiled as a whole, so that its parts cannot be told apart; valid "
            "values: 'full', 'auto', 'none', or compile parts of the block"
        )


def choose_for(blocks: Iterable[tuple[str, nn.Module]], option: str) -> list[BlockForward]:
    """Give blocks an option; those that have one already get another.

    Args:
        blocks: names and modules.
        option: one of :data:`OPTIONS`.

    Raises:
        ConfigError: see :func:`refuse_option`.
    """
    chosen = []
    for name, block in blocks:
        refuse_option(name, block, option)
        forward = forward_of(block)
        if forward is None:
            forward = BlockForward(block)
            forward.install()
        forward.option = option
        chosen.append(forward)
    return chosen
