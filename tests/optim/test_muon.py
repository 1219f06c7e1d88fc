"""Muon: torch's own on whole matrices, the whole matrix's update where it is cut, AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any

import parity
import pytest
import torch
from pool import RankError, RankPool
from torch import nn

from lightning_megapar.config import ConfigError
from lightning_megapar.models.gpt import GPT
from lightning_megapar.optim import Muon
from lightning_megapar.optim.muon import _Cut, _Whole
from lightning_megapar.shards import IndexRuns, ParameterShard

STEPS = 4


class Model(parity.Model):
    """Muon on the blocks' matrices, in a type wide enough to compare."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        dtype = torch.float64 if self.kind == "double" else torch.float32
        return Muon.of_module(self, lr=0.02, adamw_lr=1e-3, dtype=dtype, weight_decay=0.1)


class Torchs(parity.Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=0.02)


def train(style: str, world: int, options: dict[str, Any], kind: str, root: str) -> dict[str, Any]:
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_megapar import MegaParStrategy

    strategy = MegaParStrategy(**options)
    data = strategy.config.resolve(world)[0].data
    config = parity.style(style)
    record = parity.Record()
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_steps=STEPS, callbacks=[record], logger=False,
        precision="64-true" if kind != "single" else "32-true", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    kinds = {"torch": Torchs}
    rows = DataLoader(parity.Tokens(16 * STEPS, 16, 61), batch_size=16 // data)
    trainer.fit(kinds.get(kind, Model)(config, kind), rows)
    return {"losses": record.losses, "weights": record.weights}


def by_hand(style: str, kind: str) -> dict[str, Any]:
    dtype = torch.float64 if kind == "double" else torch.float32
    config = parity.style(style)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    module = Model(config, kind)
    module.gpt = model = GPT(config).to(dtype)
    optimizer = module.configure_optimizers()
    rows, losses = parity.Tokens(16 * STEPS, 16, 61), []
    for step in range(STEPS):
        part = slice(16 * step, 16 * (step + 1))
        optimizer.zero_grad()
        loss = model(rows.tokens[part], rows.labels[part])
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    torch.set_default_dtype(default)
    return {"losses": losses, "weights": {f"gpt.{k}": v.clone() for k, v in model.state_dict().items()}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel_size": 2}),
    "dp2_zero1": (2, {"data_parallel_size": 2, "zero_stage": 1}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "hybrid": (4, {"data_parallel_size": 4, "data_parallel_replicas": 2, "zero_stage": 3}),
    "dp2_tp2_zero1": (4, {"data_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1}),
}


@pytest.mark.parametrize(
    "layout",
    [*list(LAYOUTS)[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "dp2_tp2_zero1"))],
)
@pytest.mark.parametrize("style", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("double", 1e-9), pytest.param("single", 1e-5, marks=pytest.mark.slow)]
)
def test_as_on_one_device(pool: RankPool, tmp_path: Any, layout: str, style: str, kind: str, tolerance: float) -> None:
    world, options = LAYOUTS[layout]
    expected = by_hand(style, kind)
    found = pool.run(train, world, style, world, options, kind, str(tmp_path), mode="trainer")[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert set(found["weights"]) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        if name.endswith("key.bias"):
            continue  # a key's bias: its gradient is rounding alone, which AdamW blows up to full steps
        assert parity.relative(found["weights"][name], weight) <= tolerance, name


def test_torch_s_own_updates_to_the_bit() -> None:
    def trained(kind: Any, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 24, bias=False), nn.Linear(24, 6, bias=False))
        optimizer = kind(module.parameters(), lr=0.05, **options)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.randn(5, 8)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    for options in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}):
        for mine, theirs in zip(trained(Muon, **options), trained(torch.optim.Muon, **options)):
            assert torch.equal(mine, theirs)


def test_the_rest_by_adamw() -> None:
    def trained(kind: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
        options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.2}
        if kind == "adamw":
            optimizer: Any = torch.optim.AdamW(module.parameters(), **options)
        else:
            optimizer = Muon([{"params": module.parameters(), "adamw": True}], **options)
        for _ in range(5):
            optimizer.zero_grad()
            module(torch.randn(5, 4, dtype=torch.float64)).exp().mean().backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    for mine, theirs in zip(trained("muon"), trained("adamw")):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_groups_of_a_module() -> None:
    module = nn.ModuleDict({"words": nn.Embedding(7, 4), "block": nn.Linear(4, 4), "head": nn.Linear(4, 7)})
    optimizer = Muon.of_module(module)
    matrices, rest = optimizer.param_groups
    assert matrices["param_names"] == ["block.weight"] and not matrices["adamw"]
    assert sorted(rest["param_names"]) == ["block.bias", "head.bias", "head.weight", "words.weight"] and rest["adamw"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: expected at least 0"),
        ({"adjust_lr_fn": "other"}, "expected None, original, match_rms_adamw"),
        ({"ns_steps": 100}, "ns_steps=100: expected 1 to 99"),
        ({"dtype": torch.int64}, "expected a floating-point type"),
        ({"dtype": "bf16"}, "dtype='bf16': expected a floating-point type"),
        ({"lr": math.inf}, "lr=inf: expected at least 0"),
        ({"eps": -1}, "eps=-1: expected at least 0"),
        ({"momentum": 1.5}, "momentum=1.5: expected a number from 0 to below 1"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\): expected two numbers"),
        ({"betas": (1.0, 2.0)}, "expected two numbers from 0 to below 1"),
        ({"ns_steps": 2.5}, "ns_steps=2.5: expected 1 to 99"),
        ({"ns_steps": True}, "ns_steps=True: expected 1 to 99"),
        ({"ns_coefficients": (1, 2)}, "expected three numbers"),
        ({"params": [{"params": [nn.Parameter(torch.ones(3, 3))], "nesterv": True}]}, "did you mean 'nesterov'"),
        ({"params": [{"params": [nn.Parameter(torch.ones(3, 3))], "lr": -3}]}, "lr=-3: expected at least 0"),
        ({"params": [{"params": [nn.Parameter(torch.ones(3, 3))], "adamw": 1}]}, "adamw=1: expected True or False"),
        (
            {"params": [{"params": [nn.Parameter(torch.ones(3, 3))], "adjust_lr_fn": "orginal"}]},
            "did you mean 'original'",
        ),
        ({"params": [nn.Parameter(torch.ones(3))]}, r"parameter 0 of group 0 has the shape \(3,\)"),
        ({"params": [("experts", nn.Parameter(torch.ones(2, 3, 3)))]}, r"experts of group 0 has the shape \(2, 3, 3\)"),
    ],
)
def test_refused_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Muon(**{"params": [nn.Parameter(torch.ones(2, 2))], **options})


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2_zero1", marks=pytest.mark.slow)])
def test_torch_s_own_is_refused_where_matrices_are_cut(pool: RankPool, tmp_path: Any, layout: str) -> None:
    world, options = LAYOUTS[layout]
    with pytest.raises(RankError, match=r"Muon orthogonalises matrices, .* use lightning_megapar.optim.Muon"):
        pool.run(train, world, "llama", world, options, "torch", str(tmp_path), mode="trainer")


@pytest.mark.slow
def test_torch_s_own_works_where_matrices_are_whole(pool: RankPool, tmp_path: Any) -> None:
    whole = pool.run(train, 1, "llama", 1, {}, "torch", str(tmp_path), mode="trainer")[0]
    found = pool.run(train, 2, "llama", 2, {"pipeline_parallel_size": 2}, "torch", str(tmp_path), mode="trainer")[0]
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-2)  # bfloat16 inside


def gather(rank_of: list[int]) -> bool:
    """A packed, uneven cut over tensor ranks comes back as it was."""
    import torch.distributed as dist

    full = torch.arange(7 * 4, dtype=torch.float64).reshape(7, 4)
    for dim, parts in ((0, [4, 3]), (1, [1, 3])):
        shard = ParameterShard((7, 4), dim, IndexRuns.packed(parts, 2), dist.get_rank())
        whole = _Whole((_Cut(shard, dist.group.WORLD),))
        piece = whole.take(full)
        if not torch.equal(whole.gather(piece), full) or piece.shape == full.shape:
            return False
    return True


def test_packed_pieces_are_put_back(pool: RankPool) -> None:
    assert pool.run(gather, 2, [0, 1]) == [True, True]
