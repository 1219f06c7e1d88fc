"""``fp8=``: torchao's arithmetic in this package's products, on every layout; what stays out; what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from pool import RankError, RankPool
from precision_runs import LAYOUTS, train
from torch import Tensor, nn

from lightning_megapar import ConfigError, MegaParStrategy
from lightning_megapar.precision import fp8
from lightning_megapar.precision.fp8 import Fp8Layers, Fp8Options, multiplied_in_8_bits

pytest.importorskip("torchao")

RECIPES = ("rowwise", "tensorwise")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_torchao_s_bit_for_bit(recipe: str, dtype: torch.dtype) -> None:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    from lightning_megapar.precision.float8_products import Float8Products

    products = Float8Products(recipe, "auto", torch.device("cpu"))
    torch.manual_seed(0)
    x = torch.randn(3, 8, 32, dtype=dtype, requires_grad=True)
    weight = (torch.randn(48, 32, dtype=dtype) / 6).requires_grad_()
    gradient = torch.randn(3, 8, 48, dtype=dtype) * 1e-3
    expected = matmul_with_hp_or_float8_args.apply(x, weight.t(), products._mm, products.config)
    expected.backward(gradient)
    with torch.no_grad():
        flat, rows = gradient.reshape(-1, 48), x.reshape(-1, 32)
        assert torch.equal(products.output(x, weight), expected)
        assert torch.equal(products.input_gradient(flat, weight).view(x.shape), x.grad)
        assert torch.equal(products.weight_gradient(flat, rows), weight.grad)
        exact = F.linear(x.double(), weight.double())
        assert 1e-3 < float((expected.double() - exact).norm() / exact.norm()) < 0.05  # it is 8 bits


LOWEST_COSINE = {"rowwise": 0.995, "tensorwise": 0.992}
"""Of any layer's weight gradient to the one that bfloat16 gives; measured: 0.9960 and 0.9938 (queries)."""


def one_step(layout: str, recipe: str | None, precision: str = "bf16-mixed", **options: Any) -> dict[str, Any]:
    strategy = {"fp8": recipe} if recipe else {}
    result = train(layout, precision, steps=1, strategy=strategy, **options)
    return {name: result[name] for name in ("losses", "gradients", "weights")}


def cosines(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Of each weight matrix's gradient."""
    pairs = {n: (found["gradients"][0][n], g) for n, g in expected["gradients"][0].items() if g.ndim == 2}
    return {n: float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for n, (a, b) in pairs.items()}


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[str | None, dict[str, Any]]:
    kinds = (None, *RECIPES)
    return {recipe: pool.run(one_step, 1, "single", recipe, mode="trainer")[0] for recipe in kinds}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_layer_s_gradient_against_bfloat16(alone: dict[str | None, dict[str, Any]], recipe: str) -> None:
    found = cosines(alone[recipe], alone[None])
    assert len(found) > 4 * 6
    lowest = min(found, key=found.__getitem__)
    assert LOWEST_COSINE[recipe] < found[lowest] < 0.99999, (lowest, found[lowest])
    assert alone[recipe]["losses"] == pytest.approx(alone[None]["losses"], rel=5e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "layout", ["tp2", "pp2", "pp2_zb_h1", "dp2_zero1", "tp2_pp2", "dp2_tp2_zero1", "dp2_tp2_zero3"]
)
def test_on_every_layout(pool: RankPool, alone: dict[str | None, dict[str, Any]], layout: str, recipe: str) -> None:
    """A rank scales its own pieces and microbatches, so that layouts round differently, but no more."""
    found = pool.run(one_step, LAYOUTS[layout][0], layout, recipe, mode="trainer")[0]
    similar = cosines(found, alone[None])
    assert similar.keys() == cosines(alone[recipe], alone[None]).keys()
    lowest = min(similar, key=similar.__getitem__)
    assert similar[lowest] > LOWEST_COSINE[recipe], (lowest, similar[lowest])
    assert any(not torch.equal(found["gradients"][0][n], alone[None]["gradients"][0][n]) for n in similar)


class Foreign(LightningModule):
    """Torch's layers in a stack, one of them with an odd size, and a head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32), nn.Linear(32, 32)) for _ in range(2)
        )
        self.head = nn.Linear(32, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def chosen(module: nn.Module, options: Fp8Options) -> set[str]:
    layers = Fp8Layers.choose(module, options, list(module.blocks), torch.device("cpu"))
    layers.connect(module)
    layers.settle(module)
    return {name for name, child in module.named_modules() if multiplied_in_8_bits(child)}


def test_layers_of_the_stack_are_chosen_and_odd_sizes_stay_whole() -> None:
    assert chosen(Foreign(), Fp8Options()) == {f"blocks.{i}.{j}" for i in range(2) for j in (0, 2, 3)}
    module = Foreign(width=40)
    assert chosen(module, Fp8Options()) == {"blocks.0.3", "blocks.1.3"}
    assert chosen(Foreign(), Fp8Options(layers=("head", "blocks.1.*"))) == {
        "head", "blocks.1.0", "blocks.1.2", "blocks.1.3"
    }  # fmt: skip
    x = torch.randn(8, 16)
    plain = Foreign(width=40)
    plain.load_state_dict(module.state_dict())
    assert not torch.equal(module(x), plain(x)) and torch.allclose(module(x), plain(x), atol=0.1)
    with torch.no_grad():  # evaluation rounds as training does
        assert torch.equal(module(x), module(x)) and not torch.equal(module(x), plain(x))


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (40, Fp8Options(layers=("*.0",)), "'blocks.0.0' is 40 x 32 .*need multiples of 16.*nearest 32 x 32"),
        (64, Fp8Options(layers=("*.attention",)), r"fp8.layers='\*.attention' names no linear layer"),
        (64, Fp8Options(emulate=False), "fp8.emulate=False: a cpu has no 8-bit products; valid values: true, 'auto'"),
    ],
)
def test_layers_that_cannot_are_refused(width: int, options: Fp8Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(Foreign(width), options)


def test_nothing_fits_or_there_is_no_stack() -> None:
    module = Foreign(width=40)
    for block in module.blocks:
        block[3] = nn.Identity()
    with pytest.raises(ConfigError, match=r"no layer of this rank has sizes that are multiples of 16.*40 x 32"):
        chosen(module, Fp8Options())
    with pytest.raises(ConfigError, match=r"no linear layer stands in a stack of blocks of Foreign; name layers"):
        Fp8Layers.choose(Foreign(), Fp8Options(), [], torch.device("cpu"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("rowise", "fp8='rowise': expected null, rowwise, tensorwise, or a mapping of options; did you mean 'rowwise'"),
        ({"recipes": "rowwise"}, "fp8: unknown argument 'recipes'; did you mean 'recipe'"),
        ({"recipe": "blockwise"}, "fp8.recipe='blockwise' is not one of rowwise, tensorwise"),
        ({"emulate": "no"}, "fp8.emulate='no': expected true, false or 'auto'"),
        ({"layers": []}, r"fp8.layers=\[\]: expected patterns of module names, or null"),
        (8, "fp8=8: expected null, rowwise, tensorwise"),
    ],
)
def test_bad_options(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MegaParStrategy(fp8=value)


def test_without_torchao_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fp8='rowwise' needs torchao.*pip install 'lightning_megapar\[fp8\]'"):
        MegaParStrategy(fp8="rowwise")
    assert MegaParStrategy(fp8=None).fp8 is None


def test_torchao_is_imported_for_fp8_alone_and_says_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, lightning_megapar as m\n"
        "m.MegaParStrategy(); m.MegaParStrategy(fp8='rowwise')\n"
        "assert 'torchao' not in sys.modules\n"
        "import lightning_megapar.precision.float8_products\n"
        "assert 'torchao' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torchao" not in done.stdout + done.stderr and "cpp" not in done.stderr


def test_the_run_says_what_is_emulated_and_what_stays() -> None:
    module = Foreign(width=40)
    layers = Fp8Layers.choose(module, Fp8Options("tensorwise"), list(module.blocks), torch.device("cpu"))
    layers.connect(module)
    layers.settle(module)
    said = layers.describe()
    assert "fp8 (tensorwise): 6 linear layers multiply in 8 bits, but for 4 on this stage" in said
    assert "blocks.0.0 40 x 32" in said
    assert "emulated (a cpu has no 8-bit products): numbers as in 8 bits, neither their speed nor their memory" in said


def test_refused_under_tensor_parallelism_too(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"is 20 x 32 .outputs x inputs on a tensor rank., and 8-bit products need"):
        pool.run(odd, 2, str(tmp_path), mode="trainer")


def odd(root: str) -> None:
    model = parity.Model(parity.style("gpt2", ffn_hidden_size=40), "sgd")
    train("tp2", "bf16-mixed", model=model, steps=1, strategy={"fp8": {"layers": "*.mlp.*"}}, root=root)


def test_a_pattern_that_names_nothing_is_refused_before_ranks_exist(tmp_path: Path) -> None:
    """A module that is built already is looked at before any process group."""
    import torch.distributed as dist
    from lightning.pytorch import Trainer

    trainer = Trainer(
        strategy=MegaParStrategy(fp8={"layers": "heda"}),
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(
        ConfigError, match=r"fp8.layers='heda' names no linear layer of the module; did you mean 'head'"
    ):
        trainer.fit(Foreign(), torch.utils.data.DataLoader(torch.randn(4, 16)))
    assert not dist.is_initialized()
