"""Runs of the test decoder in one of Lightning's precisions, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import parity
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {"data_parallel_size": 2}),
    "dp2_zero1": (2, {"data_parallel_size": 2, "zero_stage": 1}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2_zb_h1": (2, {"pipeline_parallel_size": 2, "pipeline_schedule": "zb_h1"}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp2_tp2_zero1": (4, {"data_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1}),
    "dp2_pp2_zbv_zero1": (
        4,
        {"data_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "zbv", "zero_stage": 1},
    ),
    "dp2_zero2": (2, {"data_parallel_size": 2, "zero_stage": 2, "num_microbatches": 2}),
    "dp2_tp2_zero3": (
        4,
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 3, "num_microbatches": 2},
    ),
    "dp2_pp2_zero1": (4, {"data_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}),
}


def precision_of(name: str) -> dict[str, Any]:
    """The Trainer's arguments for a precision; ``16-mixed`` as it is asked for on a CPU."""
    from lightning_megapar.precision import float16_plugin

    return {"plugins": [float16_plugin()]} if name == "16-mixed" else {"precision": name}


def train(
    layout: str,
    precision: str,
    *,
    steps: int = 3,
    model: Any = None,
    callbacks: list[Callback] | None = None,
    optimizer: str = "sgd",
    clip: float | None = None,
    accumulate: int = 1,
    ckpt: str | None = None,
    save: str | None = None,
    strategy: dict[str, Any] | None = None,
    root: str = "/tmp/megapar-precision",
) -> dict[str, Any]:
    """Train on this rank (in the pool, mode ``trainer``)."""
    from lightning_megapar import MegaParStrategy

    world, options = LAYOUTS[layout]
    made = MegaParStrategy(seed=7, **options, **(strategy or {}))
    data = made.config.resolve(world)[0].data
    config = parity.style("gpt2")
    batch = 8 // data // accumulate
    loader = DataLoader(parity.Tokens(8 * steps, 16, 61), batch_size=batch)
    record = parity.Record()
    trainer = Trainer(
        strategy=made,
        accelerator="cpu",
        devices=world,
        max_steps=steps,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        callbacks=[record, *(callbacks or [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **precision_of(precision),
    )
    trainer.fit(model or parity.Model(config, optimizer), loader, ckpt_path=ckpt)
    if save is not None:
        trainer.save_checkpoint(save)
    full = trainer.strategy.full_state_dict()
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {
        "losses": record.losses,
        "norms": record.norms,
        "gradients": record.gradients,
        "weights": {k: v.float() for k, v in full.items()},
        "dtypes": {p.parameter.dtype for p in trainer.strategy.prepared.parameters},
        "scale": trainer.strategy.loss_scale,
        "metrics": metrics,
    }


def weights_of(result: dict[str, Any]) -> torch.Tensor:
    return torch.cat([v.flatten() for _, v in sorted(result["weights"].items())])
