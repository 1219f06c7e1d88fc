"""Modules written without a thought of pipelines, cut into stages that play in one process: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo.trial import Stages, Verdict, compare, evaluation_error, judge, perturbed

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline import entrance
from lightning_megapar.pipeline.cut import StageError

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


EXACT = [
    *(Net, WeightReadElsewhere, Tied, TiedBlocks, NormInTheLoop, BeforeAndAfter, Registered, OwnedOnThePath),
    *(ValueResidual, AllHiddenStates, UShaped, SharedDict, HookedLosses, ReadOffBlocks, SideBySide),
    *(HeadsOfTheSameNumber, BranchOnAValue, Written, TwoWays, Objects),
]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("kind", EXACT, ids=lambda k: k.__name__)
def test_like_one_process(kind: type[Net], stages: int) -> None:
    torch.manual_seed(0)
    verdict = compare(kind(), step, stages)
    assert verdict.kind == "exact", verdict
    assert evaluation_error(kind(), step, stages) < 1e-12


class Twice(Net):
    def body(self, hidden: Tensor) -> Tensor:
        return super().body(super().body(hidden))


class Backwards(Net):
    def body(self, hidden: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return hidden


class Reentrant(Net):
    def body(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True)  # type: ignore[assignment]
        return hidden


class SlotBlock(ObjectBlock):
    class State:
        __slots__ = ("hidden",)

        def __init__(self, hidden: Tensor) -> None:
            self.hidden = hidden


class Slots(Net):
    """The hidden state is an object that nobody can look into."""

    block = SlotBlock
    count = 2

    def body(self, hidden: Tensor) -> Tensor:
        state: Any = SlotBlock.State(hidden)
        for layer in self.layers:
            state = layer(state)
        return state.hidden


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (AttributeLosses, "used outside of the blocks without having been returned"),
        (Twice, "'layers' was called 2 times in one step"),
        (Backwards, "block 'layers.2' of the pipelined stack 'layers' is called after its successors"),
        (Reentrant, "use use_reentrant=False"),
        (Slots, "returns an object of type SlotBlock.State, which cannot travel"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused_before_the_first_step(kind: type[Net], message: str) -> None:
    verdict = compare(kind(), step)
    assert verdict.kind == "refused"
    with pytest.raises((ConfigError, StageError), match=message):
        raise StageError(verdict.reason)


@pytest.mark.parametrize("kind", [Registered, NormInTheLoop, WeightReadElsewhere])
def test_without_a_survey_the_message_says_what_to_keep(kind: type[Net]) -> None:
    module = perturbed(kind())
    played = Stages(module, 2)
    with pytest.raises(StageError, match=r"pipeline_keep={.(embed|head|norm).: .(last|first|all).}"):
        played.rehearse(step)


def test_the_remedies_of_the_messages_work() -> None:
    for kind, keep in (
        (Registered, {"head": "last", "embed": "first"}),
        (NormInTheLoop, {"norm": "all"}),
        (WeightReadElsewhere, {"embed": "all"}),
    ):
        module = perturbed(kind())
        expected = step(module)
        played = Stages(module, 2, keep=keep)
        played.rehearse(step)
        assert float(played.run(step)) == pytest.approx(float(expected.detach()), rel=1e-12)


class Changing(Net):
    """Uses the embedding again, but not in the first step."""

    late = False

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        out = self.body(hidden)
        return self.head(out + hidden if self.late else out)


def test_what_a_later_step_needs_for_the_first_time_stops_it() -> None:
    played = Stages(perturbed(Changing()), 2)
    played.rehearse(step)
    played.run(step)
    for module in played.modules:
        module.late = True
    with pytest.raises(StageError, match="needs what 'embed' returned on a later pipeline stage"):
        played.run(step)


class Counting(Net):
    """A step that changes the module: a counter, a running mean, a list, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("mean", torch.zeros(()))
        self.normalize = nn.BatchNorm1d(31)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        logits = self.normalize(super().forward(ids).transpose(1, 2)).transpose(1, 2)
        self.mean.lerp_(logits.detach().mean() + 1.0, 0.5)
        return logits


def test_a_rehearsal_leaves_no_trace() -> None:
    module = perturbed(Counting())
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    played = Stages(module, 2)
    played.rehearse(step)
    for held in played.modules:
        assert held.calls == 0 and held.seen == []
        for name, value in held.state_dict().items():
            assert torch.equal(value, expected[name]), name
    played.run(step)
    assert played.modules[1].calls == 1 and played.modules[1].seen == [1]


def test_the_trial_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: a boundary that loses a thousandth of its gradient is not exact."""
    monkeypatch.setattr(
        entrance.Entrance, "backward", staticmethod(lambda ctx, gradient: 0.999 * gradient), raising=True
    )
    assert compare(Net(), step).kind == "wrong"


def test_the_trial_sees_a_wrong_loss() -> None:
    module = perturbed(Net())
    verdict = judge(module, step, 1.0, {})
    assert isinstance(verdict, Verdict) and verdict.kind == "wrong"
