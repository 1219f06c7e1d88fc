"""Pretrain a decoder on text under any layout: ``python recipes/pretrain.py parallel=tp2_pp2``; see ``--help``."""

from __future__ import annotations

from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_megapar.hydra_app.app import hydra_main
from lightning_megapar.hydra_app.recipe import open_run, resumed_settings, settle_devices
from lightning_megapar.hydra_app.schema import PretrainSettings


@hydra_main(config_path="../conf", config_name="pretrain", schema=PretrainSettings)
def main(cfg: DictConfig) -> float | None:
    from lightning.pytorch import seed_everything

    from lightning_megapar.models.language_model import LanguageModel

    # Refusals first: nothing below this block can fail for a setting's sake, and no rank exists before the last line.
    cfg, resume = resumed_settings(cfg, PretrainSettings)
    seed_everything(cfg.seed)
    data = instantiate(cfg.data)
    module = LanguageModel(instantiate(cfg.model), instantiate(cfg.optimizer))
    plan = settle_devices(cfg, module.config)
    print(plan.describe(), data.describe(), sep="\n")

    with open_run(cfg, resume) as run:
        callbacks = [instantiate(node) for node in cfg.callbacks.values()]
        loggers = [instantiate(node) for node in cfg.logger.values()]
        trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False)
        trainer.fit(module, datamodule=data, ckpt_path=resume.checkpoint)
        if trainer.is_global_zero:
            print(f"run directory: {run.path}")
        return float(trainer.callback_metrics["val_loss"]) if "val_loss" in trainer.callback_metrics else None


if __name__ == "__main__":
    main()
