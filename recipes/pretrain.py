"""Pretrain a decoder on text under any layout: ``python recipes/pretrain.py parallel=tp2_pp2``; see ``--help``."""

from __future__ import annotations

from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_megapar.hydra_app import hydra_main, open_run, resumed_settings, settle_devices
from lightning_megapar.hydra_app.schema import PretrainSettings


# hydra.main plus: unknown settings are refused, exit codes mean something, each job of a sweep has ranks of its own.
@hydra_main(config_path="../conf", config_name="pretrain", schema=PretrainSettings)
def main(cfg: DictConfig) -> float | None:
    from lightning.pytorch import seed_everything

    from lightning_megapar.models.language_model import LanguageModel

    # Whatever a setting can make impossible is refused here, before the ranks exist: fit starts them.
    cfg, resume = resumed_settings(cfg, PretrainSettings)
    seed_everything(cfg.seed)
    module = LanguageModel(instantiate(cfg.model), instantiate(cfg.optimizer))
    settle_devices(cfg, module.config)
    data = instantiate(cfg.data)
    data.prepare_data()

    with open_run(cfg, resume) as run:
        callbacks = [instantiate(node) for node in cfg.callbacks.values()]
        loggers = [instantiate(node) for node in cfg.logger.values()]
        trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False)
        trainer.print(data.describe())
        trainer.fit(module, datamodule=data, ckpt_path=resume.checkpoint)
        trainer.print(f"run directory: {run.path}")
        val_loss = trainer.callback_metrics.get("val_loss")
    return None if val_loss is None else float(val_loss)


if __name__ == "__main__":
    main()
