"""Modules written without a thought of pipelines; each does something that a cut must get right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
IDS = torch.randint(0, 31, (3, 7), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *extra: Tensor) -> Any:
        return hidden + torch.tanh(self.linear(self.norm(hidden + sum(extra))))


class Net(nn.Module):
    """Embedding, four blocks, head; the loss is a method, so that every kind can do it its own way."""

    block: Any = Block
    count = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList([self.block() for _ in range(self.count)])
        self.head = nn.Linear(WIDTH, 31)

    def body(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))

    def loss(self) -> Tensor:
        ids = IDS.to(self.embed.weight.device)
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())


def step(module: Any) -> Tensor:
    return module.loss()


class WeightReadElsewhere(Net):
    """The output layer reads the embedding's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.body(self.embed(ids)), self.embed.weight)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.embed.weight


class TiedBlocks(Net):
    """Blocks share weights across the cut, and one block is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].linear.weight = self.layers[0].linear.weight  # type: ignore[union-attr]
        self.layers[2] = self.layers[1]


class NormInTheLoop(Net):
    """One module, registered behind the blocks, used between all of them and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def body(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.norm(layer(hidden))
        return self.norm(hidden * 2)


class BeforeAndAfter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.both(self.body(self.both(self.embed(ids)))))


class Registered(Net):
    """Everything is registered on the wrong side of the blocks."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head = nn.Linear(WIDTH, 31)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.embed = nn.Embedding(31, WIDTH)


class Inner(nn.Module):
    """A module on the path to the blocks, with parameters of its own that are used before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * self.scale


class OwnedOnThePath(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Inner()  # type: ignore[assignment]

    def body(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


class ValueResidual(Net):
    """What the first block made is used by all later ones, next to the embedding."""

    def body(self, hidden: Tensor) -> Tensor:
        start = hidden
        first = None
        for layer in self.layers:
            hidden = layer(hidden, start) if first is None else layer(hidden, first, start)
            first = hidden if first is None else first
        return hidden


class AllHiddenStates(Net):
    def body(self, hidden: Tensor) -> Tensor:
        states = [hidden]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return torch.stack(states).mean(0)


class UShaped(Net):
    """Skips across the middle, as in a U-Net."""

    def body(self, hidden: Tensor) -> Tensor:
        one = self.layers[0](hidden)
        two = self.layers[1](one)
        three = self.layers[2](two + one)
        return self.layers[3](three + hidden)


class KeyBlock(Block):
    """Early blocks leave a tensor in a dict that every block gets; late ones take it out."""

    def forward(self, hidden: Tensor, shared: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        if "key" not in shared:
            shared["key"] = self.linear(hidden)
        return super().forward(hidden, shared["key"])


class SharedDict(Net):
    block = KeyBlock

    def body(self, hidden: Tensor) -> Tensor:
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            hidden = layer(hidden, shared)
        return hidden


class Router(nn.Linear):
    pass


class RoutedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(WIDTH, 3)

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * (1 + self.router(hidden).softmax(-1)[..., :1])


class HookedLosses(Net):
    """Collects an auxiliary loss of every block by hooks that are put on when they are first needed."""

    block = RoutedBlock
    hooked = False

    def loss(self) -> Tensor:
        if not self.hooked:
            self.found: list[Tensor] = []
            for part in self.modules():
                if isinstance(part, Router):
                    part.register_forward_hook(lambda m, args, output: self.found.append(output))
            self.hooked = True
        self.found.clear()
        loss = super().loss()
        return loss + torch.stack(self.found).pow(2).mean()


class AttributeBlock(Block):
    auxiliary: Tensor

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        self.auxiliary = self.linear(hidden).pow(2).mean()
        return super().forward(hidden)


class AttributeLosses(Net):
    """Collects an auxiliary loss of every block from an attribute."""

    block = AttributeBlock

    def loss(self) -> Tensor:
        loss = super().loss()
        found = [layer.auxiliary for layer in self.layers if hasattr(layer, "auxiliary")]
        return loss + sum(found)


class TypedBlock(Block):
    kind = "typed"

    @property
    def rate(self) -> float:
        return 0.5 * self.linear.in_features

    def shift(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear.weight.shape[0]


class ReadOffBlocks(Net):
    """The loop asks blocks of other stages for types, attributes, parts, dtypes, properties and methods."""

    block = TypedBlock

    def body(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, TypedBlock) and not isinstance(layer, nn.LayerNorm) and layer.kind == "typed"
            assert layer.linear.out_features == WIDTH and hasattr(layer, "norm") and not hasattr(layer, "other")
            hidden = layer(layer.shift(hidden).to(layer.linear.weight.dtype) / layer.rate)
        return hidden


class SideBySide(Net):
    """Lists of modules side by side instead of blocks, as in XLM."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])

    def body(self, hidden: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms):
            hidden = norm(hidden + layer(hidden))
        return hidden


class HeadsOfTheSameNumber(Net):
    """As many heads as blocks, but all of them run at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 31) for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embed(ids))
        return sum(head(hidden) for head in self.heads)  # type: ignore[return-value]


class BranchOnAValue(Net):
    """Which way the step goes depends on what the embedding returned."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        factor = 2.0 if hidden.mean() > 100 else 0.5
        return self.head(self.body(hidden) * factor)


class Written(Net):
    """Values of an earlier stage are written into a tensor made here."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        kept = torch.zeros_like(hidden)
        kept[:, 0] = hidden[:, 0]
        return self.head(self.body(hidden) + kept)


class TwoWays(Net):
    """Tuples, a dataclass and plain values travel; masks are made from shapes alone."""

    def body(self, hidden: Tensor) -> Tensor:
        mask = torch.ones(hidden.shape[:2], dtype=hidden.dtype, device=hidden.device)[..., None]
        state = (hidden * mask, {"count": 0, "sum": torch.zeros_like(hidden)})
        for layer in self.layers:
            new = layer(state[0] * mask)
            state = (new, {"count": state[1]["count"] + 1, "sum": state[1]["sum"] + new})
        return state[0] + state[1]["sum"] / state[1]["count"]


class ObjectBlock(Block):
    class State:
        def __init__(self, hidden: Tensor) -> None:
            self.hidden = hidden

    def forward(self, state: Any) -> Any:  # type: ignore[override]
        return self.State(super().forward(state.hidden))


class Objects(Net):
    block = ObjectBlock

    def body(self, hidden: Tensor) -> Tensor:
        state = ObjectBlock.State(hidden)
        for layer in self.layers:
            state = layer(state)
        return state.hidden


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.mix(hidden))


class PartCalled(Net):
    """The step calls a module as a whole and, before that, a part of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed
        self.encoder = Encoder()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.encoder(self.encoder.table(ids))))

    def loss(self) -> Tensor:
        ids = IDS.to(self.head.weight.device)
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())
