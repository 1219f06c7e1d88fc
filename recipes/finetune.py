"""Finetune a transformers model on text under any layout; see ``--help``.

    python recipes/finetune.py model_path=DIR data=text data.source=notes/ parallel=tp2_pp2 optimizer.lr=2e-5

Without ``model_path`` it trains a small random Llama, so that it runs anywhere. At the end the model stands in the run
directory as a Hugging Face directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch import Tensor, nn

from lightning_megapar.config import ConfigError
from lightning_megapar.hydra_app import hydra_main, open_run, resumed_settings, settle_devices
from lightning_megapar.hydra_app.schema import FinetuneSettings


class Finetune(LightningModule):
    """An ordinary LightningModule around ``AutoModelForCausalLM``; it knows nothing of parallelism.

    Args:
        config: of the model: transformers' object, or its dictionary (from a checkpoint).
        optimizer: an ``OptimizerConfig``, or a mapping of its fields.
    """

    def __init__(self, config: Any, optimizer: Any) -> None:
        from transformers import AutoConfig

        from lightning_megapar.models.language_model import OptimizerConfig

        super().__init__()
        self.config = AutoConfig.for_model(**config) if isinstance(config, Mapping) else config
        self.optimizer = OptimizerConfig(**optimizer) if isinstance(optimizer, Mapping) else optimizer
        self.save_hyperparameters({"config": self.config.to_dict(), "optimizer": vars(self.optimizer)})
        self.model: Any = None

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if self.model is None:
            # In the Trainer's precision, not in that of the files.
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.get_default_dtype())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each one."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["tokens"]))
        return {"loss": loss, "num_valid_tokens": (batch["labels"] != -100).sum()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, batch_size=len(batch["tokens"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        from lightning_megapar.models.language_model import make_optimizer

        return make_optimizer(self, self.optimizer)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["tokens"]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


# hydra.main plus: unknown settings are refused, exit codes mean something, each job of a sweep has ranks of its own.
@hydra_main(config_path="../conf", config_name="finetune", schema=FinetuneSettings)
def main(cfg: DictConfig) -> float | None:
    from lightning.pytorch import seed_everything

    # Whatever a setting can make impossible is refused here, before the ranks exist: fit starts them.
    cfg, resume = resumed_settings(cfg, FinetuneSettings)
    seed_everything(cfg.seed)
    module = Finetune(model_config(cfg), instantiate(cfg.optimizer))
    plan = settle_devices(cfg)
    check(cfg, module, plan)
    if resume.checkpoint is not None:
        cfg.trainer.strategy.load_from = None  # the checkpoint holds the weights
    data = instantiate(cfg.data)
    data.prepare_data()

    with open_run(cfg, resume) as run:
        callbacks = [instantiate(node) for node in cfg.callbacks.values()]
        loggers = [instantiate(node) for node in cfg.logger.values()]
        trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False)
        trainer.print(data.describe())
        trainer.fit(module, datamodule=data, ckpt_path=resume.checkpoint)
        run.keep_older("hugging_face")
        written = trainer.strategy.save_hugging_face(
            run.path / "hugging_face", tokenizer_from=cfg.model_path, max_file_bytes=cfg.max_file_bytes
        )
        trainer.print(f"run directory: {run.path}")
        trainer.print(f"Hugging Face directory: {written}")
        val_loss = trainer.callback_metrics.get("val_loss")
    return None if val_loss is None else float(val_loss)


def model_config(cfg: DictConfig) -> Any:
    """The configuration of ``model_path``, or of the small random model."""
    import transformers

    transformers.logging.set_verbosity_error()
    if cfg.model_path is None:
        return instantiate(cfg.model)
    given = [override for override in HydraConfig.get().overrides.task if override.lstrip("+~").startswith("model.")]
    if given:
        raise ConfigError(f"{given[0]} changes the small random model, but model_path={cfg.model_path} takes its place")
    refuse_no_model(cfg.model_path)
    try:
        return transformers.AutoConfig.from_pretrained(cfg.model_path, local_files_only=True)
    except Exception as error:  # a configuration may raise anything when its values do not fit
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model_path={cfg.model_path} is not a Hugging Face model directory: {reason}") from error


def refuse_no_model(path: str) -> None:
    """Refuse a ``model_path`` that is no directory of a model, before transformers looks for it on the internet."""
    directory = Path(path)
    if not directory.exists():
        beside = sorted(p.parent.name for p in directory.parent.glob("*/config.json"))
        near = get_close_matches(directory.name, beside, n=1)
        hint = f"; did you mean {str(directory.with_name(near[0]))!r}?" if near else ""
        raise ConfigError(
            f"model_path={path} is not a Hugging Face model directory: it does not exist{hint} (a model of a hub is "
            "downloaded first: hf download NAME --local-dir DIR)"
        )
    if not directory.is_dir():
        raise ConfigError(
            f"model_path={path} is not a Hugging Face model directory: it is a file; did you mean "
            f"{str(directory.parent)!r}?"
        )
    if not (directory / "config.json").is_file():
        inside = sorted(str(p.parent) for p in directory.glob("*/config.json"))
        hint = f"; did you mean {inside[0]!r}?" if inside else ""
        held = ", ".join(sorted(p.name for p in directory.iterdir())[:5]) or "nothing"
        raise ConfigError(
            f"model_path={path} is not a Hugging Face model directory: it has no config.json (it holds {held}){hint}"
        )


def check(cfg: DictConfig, module: Finetune, plan: Any) -> None:
    """Refuse a model that the data or the layout does not fit; builds it without memory."""
    from transformers import AutoModelForCausalLM

    from lightning_megapar.checkpoint.hugging_face.reading import check_load_from
    from lightning_megapar.data import VOCAB_SIZE
    from lightning_megapar.strategy.prepare import check_module

    if type(module.config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"model_path={cfg.model_path} is a {module.config.model_type!r} model, of which transformers has no causal "
            "language model; this recipe trains those that AutoModelForCausalLM makes"
        )

    text = module.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if text.vocab_size < VOCAB_SIZE:
        raise ConfigError(f"the model's vocab_size={text.vocab_size} is below {VOCAB_SIZE}: 256 bytes and a separator")
    if longest is not None and cfg.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length={cfg.data.sequence_length} is above the model's max_position_embeddings={longest}; "
            f"nearest valid: {longest}"
        )
    with torch.device("meta"):
        module.configure_model()
    check_module(module, plan.layout, plan.parallel, load_from=check_load_from(cfg.model_path))
    module.model = None


if __name__ == "__main__":
    main()
