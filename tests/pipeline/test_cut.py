"""Modules written without a thought of pipelines, cut into stages that play in one process: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline.cut_models import (
    AllHiddenStates,
    AttributeLosses,
    BeforeAndAfter,
    BranchOnAValue,
    HeadsOfTheSameNumber,
    HookedLosses,
    Net,
    NormInTheLoop,
    ObjectBlock,
    Objects,
    OwnedOnThePath,
    PartCalled,
    ReadOffBlocks,
    Registered,
    SharedDict,
    SideBySide,
    Tied,
    TiedBlocks,
    TwoWays,
    UShaped,
    ValueResidual,
    WeightReadElsewhere,
    Written,
    step,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo.trial import Stages, Verdict, compare, evaluation_error, judge, perturbed

from lightning_megapar.config import ConfigError
from lightning_megapar.pipeline.cutting import entrance
from lightning_megapar.pipeline.cutting.cut import StageError

EXACT = [
    *(Net, WeightReadElsewhere, Tied, TiedBlocks, NormInTheLoop, BeforeAndAfter, Registered, OwnedOnThePath),
    *(ValueResidual, AllHiddenStates, UShaped, SharedDict, HookedLosses, ReadOffBlocks, SideBySide),
    *(HeadsOfTheSameNumber, BranchOnAValue, Written, TwoWays, Objects, PartCalled),
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


@pytest.mark.parametrize("kind", [Registered, NormInTheLoop, WeightReadElsewhere, PartCalled])
def test_without_a_survey_the_message_says_what_to_keep(kind: type[Net]) -> None:
    module = perturbed(kind())
    played = Stages(module, 2)
    with pytest.raises(StageError, match=r"pipeline_keep={.(embed|head|norm|encoder).: .(last|first|all).}"):
        played.rehearse(step)


def test_the_remedies_of_the_messages_work() -> None:
    for kind, keep in (
        (Registered, {"head": "last", "embed": "first"}),
        (NormInTheLoop, {"norm": "all"}),
        (WeightReadElsewhere, {"embed": "all"}),
        (PartCalled, {"encoder": "all"}),
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
