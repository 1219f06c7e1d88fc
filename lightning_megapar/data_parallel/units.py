"""Which modules FSDP2 shards together: a stack's blocks one by one, what stands beside them, and ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_megapar.config import ConfigError


def units_of(module: nn.Module, blocks: Sequence[nn.Module], stage: int = 1) -> list[tuple[nn.Module, ...]]:
    """Modules to shard, each with those that it has to be sharded with.

    Every block with parameters is a unit, and so is every module with parameters beside the path to the blocks.
    Modules beside it that share a parameter are one unit. Parameters that a module on the path owns itself stay
    replicated.

    Args:
        module: this rank's share.
        blocks: of the stack.
        stage: of ZeRO, for messages.

    Raises:
        ConfigError: a parameter without dimensions, one that a block shares with another block or with a module beside
            the stack, or one that a module beside it shares with one on the path.
    """
    _refuse_tied_blocks(module, blocks, stage)
    inside = {id(m) for block in blocks for m in block.modules()}
    beside: dict[nn.Module, str] = {}
    on_path: dict[nn.Parameter, str] = {}

    def walk(path: str, parent: nn.Module) -> None:
        on_path.update((p, f"{path}{name}") for name, p in parent._parameters.items() if p is not None)
        for name, child in parent.named_children():
            if id(child) in inside or next(child.parameters(), None) is None:
                continue
            # Lists of modules have no forward.
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or any(id(m) in inside for m in child.modules()):
                walk(f"{path}{name}.", child)
            else:
                beside.setdefault(child, f"{path}{name}")

    walk("", module)
    groups: list[list[nn.Module]] = []
    for child, path in beside.items():
        parameters = set(child.parameters())
        _refuse_tied_to_the_path(child, path, on_path, stage)
        tied = [g for g in groups if any(p in parameters for member in g for p in member.parameters())]
        groups = [g for g in groups if g not in tied]
        groups.append([*(member for g in tied for member in g), child])
    units = [
        *((block,) for block in blocks if next(block.parameters(), None) is not None),
        *(tuple(group) for group in groups),
    ]
    _refuse_scalars(module, units, stage)
    return units


def _refuse_scalars(module: nn.Module, units: Sequence[Sequence[nn.Module]], stage: int) -> None:
    sharded = {id(p) for unit in units for part in unit for p in part.parameters()}
    scalars = [name for name, p in module.named_parameters() if p.ndim == 0 and id(p) in sharded]
    if scalars:
        raise ConfigError(
            f"zero_stage={stage}: {', '.join(map(repr, scalars[:3]))} has no dimension along which data ranks could "
            "share it out. Valid values: zero_stage=0, or give it the shape (1,)"
        )


def _refuse_tied_to_the_path(child: nn.Module, path: str, on_path: Mapping[nn.Parameter, str], stage: int) -> None:
    for name, parameter in child.named_parameters():
        if parameter in on_path:
            raise ConfigError(
                f"zero_stage={stage}: {on_path[parameter]!r} and '{path}.{name}' are one parameter (tied weights), of "
                "a module around the blocks and of one beside them; the latter is sharded over the data ranks by "
                "itself, so that they would come apart. Valid values: zero_stage=0, or give each its own parameter"
            )


def _refuse_tied_blocks(module: nn.Module, blocks: Sequence[nn.Module], stage: int) -> None:
    """FSDP2 makes a parameter of its own of each unit's: one that two units hold would come apart."""
    numbers = {id(block): number for number, block in enumerate(blocks)}
    inside = {id(child): number for number, block in enumerate(blocks) for child in block.modules()}
    everywhere = dict(module.named_modules(remove_duplicate=False))
    places = {path: numbers[id(child)] for path, child in everywhere.items() if id(child) in numbers}

    def block_of(path: str, owner: nn.Module) -> int | None:
        parts = path.split(".")
        around = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        # A part of a block may be registered outside of it as well: that is another name, no tie.
        return next((places[name] for name in around if name in places), inside.get(id(owner)))

    owned = (
        (path, child, name, parameter)
        for path, child in everywhere.items()
        for name, parameter in child._parameters.items()
        if parameter is not None
    )
    seen: dict[int, tuple[str, int | None]] = {}
    for path, child, attribute, parameter in owned:
        name, block = ".".join(filter(None, (path, attribute))), block_of(path, child)
        other, other_block = seen.setdefault(id(parameter), (name, block))
        if block != other_block:
            shared = "two blocks share" if None not in (block, other_block) else "a block shares with a module outside"
            raise ConfigError(
                f"zero_stage={stage}: {other!r} and {name!r} are one parameter (tied weights), which {shared}; each "
                "block is sharded over the data ranks by itself, so that they would come apart. Valid values: "
                "zero_stage=0, or give each its own parameter"
            )
