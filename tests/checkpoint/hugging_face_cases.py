"""Somebody's LightningModule around a transformers model, and what a rank does with it in the tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 8, 3
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}


def config_of(name: str) -> Any:
    """A tiny configuration of an architecture."""
    import transformers

    llama = {
        **COMMON,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    if name == "llama":
        return transformers.LlamaConfig(**llama, tie_word_embeddings=False)
    if name == "llama_tied":
        return transformers.LlamaConfig(**llama, tie_word_embeddings=True)
    if name == "mixtral":
        return transformers.MixtralConfig(**llama, num_local_experts=4, num_experts_per_tok=2)
    gpt2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
    return transformers.GPT2Config(**COMMON, **gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def model_of(config: Any, seed: int = 0) -> Any:
    """A whole model on the CPU with values that no rule of initialisation gives."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.eval()


def written(directory: Path, config: Any, **options: Any) -> Any:
    """Write a model with transformers' own ``save_pretrained``; returns it."""
    model = model_of(config)
    model.save_pretrained(directory, **options)
    return model


def tokens(rows: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.rows = tokens(BATCH * STEPS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}


class User(LightningModule):
    """Knows nothing of parallelism, files or layouts."""

    def __init__(self, config: Any, lr: float = 0.1) -> None:
        super().__init__()
        self.config, self.lr = config, lr
        self.model: Any = None

    def configure_model(self) -> None:
        import transformers

        if self.model is None:
            self.model = transformers.AutoModelForCausalLM.from_config(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class BuiltAtOnce(User):
    """The same, built in the constructor on the CPU."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.configure_model()


def reference(source: Any, steps: int = STEPS) -> dict[str, Any]:
    """Train a whole model by hand in one process: losses, the last gradients, weights."""
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    rows, losses, gradients = tokens(BATCH * steps), [], {}
    source.train()
    for step in range(steps):
        optimizer.zero_grad()
        batch = rows[step * BATCH : (step + 1) * BATCH]
        loss = source(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        gradients = {f"model.{n}": p.grad.clone() for n, p in source.named_parameters()}
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {f"model.{k}": v.clone() for k, v in source.state_dict().items()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def trainer_of(world: int, root: str, steps: int = STEPS, **options: Any) -> Trainer:
    from lightning_megapar import MegaParStrategy

    return Trainer(
        strategy=MegaParStrategy(**options),
        accelerator="cpu",
        devices=world,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )


def train_and_write(
    config: Any,
    world: int,
    options: dict[str, Any],
    out: str | None = None,
    *,
    build: str = "empty",
    max_file_bytes: int = 5_000_000_000,
    tokenizer_from: str | None = None,
) -> dict[str, Any]:
    """On a rank: fill, train three steps, write. Rank 0 returns initial and final weights, losses and gradients."""
    import parity
    import transformers

    transformers.logging.set_verbosity_error()

    class First(parity.Record):
        initial: dict[str, Tensor]

        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            self.initial = trainer.strategy.full_state_dict()

    record = First()
    trainer = trainer_of(world, out or "/tmp/megapar-hf", empty_init=build == "empty", **options)
    trainer.callbacks.append(record)
    data = trainer.strategy.config.resolve(world)[0].data
    module = BuiltAtOnce(config) if build == "at once" else User(config)
    if build == "init_module":
        with trainer.init_module(empty_init=True):
            module = BuiltAtOnce(config)
        assert all(p.is_meta for p in module.parameters())
    trainer.fit(module, DataLoader(Rows(), batch_size=BATCH // data))
    if out is not None:
        trainer.strategy.save_hugging_face(out, max_file_bytes=max_file_bytes, tokenizer_from=tokenizer_from)
    return {
        "initial": record.initial,
        "weights": record.weights,
        "losses": record.losses,
        "gradients": record.gradients[-1] if record.gradients else {},
    }


def expect_refusal(config: Any, world: int, options: dict[str, Any], out: str | None = None) -> str:
    """On a rank: the message with which filling or writing is refused."""
    try:
        train_and_write(config, world, options, out)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def train_and_checkpoint(config: Any, world: int, options: dict[str, Any], path: str) -> dict[str, Tensor]:
    """On a rank: train three steps and save a sharded checkpoint; rank 0 returns the whole state."""
    trainer = trainer_of(world, path, empty_init=True, **options)
    module = User(config)
    module.save_hyperparameters({"config": config.to_dict()})
    trainer.fit(module, DataLoader(Rows(), batch_size=BATCH // trainer.strategy.config.resolve(world)[0].data))
    trainer.save_checkpoint(path)
    return trainer.strategy.full_state_dict()


def write_on_a_full_disk(config: Any, world: int, options: dict[str, Any], out: str) -> str:
    """On a rank: the message when rank 0's disk is full at the second file."""
    import errno

    from safetensors import torch as safetensors

    written = []
    save_file = safetensors.save_file

    def full(tensors: dict[str, Tensor], path: Path, **rest: Any) -> None:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        save_file(tensors, path, **rest)

    safetensors.save_file = full
    try:
        train_and_write(config, world, options, out, max_file_bytes=20_000)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """What a directory's files hold, read by safetensors itself."""
    from safetensors.torch import load_file

    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def store(tensors: dict[str, Tensor], directory: Path) -> None:
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")


def save_whole(module: Any, directory: Path, part: str | None = None) -> None:
    """Write a module that is whole in this one process."""
    from lightning_megapar.checkpoint.hugging_face.saving import find_blueprint, save_hugging_face
    from lightning_megapar.data_parallel.parameters import ModuleNames
    from lightning_megapar.sharding.blueprint import record_blueprints
    from lightning_megapar.strategy.prepare import local_state

    names = ModuleNames.record(module)
    blueprint = find_blueprint(record_blueprints(module), part)
    save_hugging_face(directory, blueprint, local_state(module, names), lambda name: names.canonical.get(name, name))


def names_in(directory: str | os.PathLike[str]) -> set[str]:
    return {path.name for path in Path(directory).iterdir()}


def status_bytes(key: str) -> int:
    """A line of ``/proc/self/status`` (Linux): ``VmRSS`` is held now, ``VmHWM`` was held at most."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:"))


def forget_peak() -> None:
    """``VmHWM`` starts anew from what is held now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def measure_start(
    config: Any, world: int, options: dict[str, Any], out: str | None, max_file_bytes: int = 0
) -> dict[str, int]:
    """On a rank: peak host memory of set-up beyond what the imports hold, and of writing beyond what training holds."""
    import gc

    import transformers
    from lightning.pytorch import Callback

    transformers.logging.set_verbosity_error()

    class Watch(Callback):
        peak = shard = 0

        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            self.peak = status_bytes("VmHWM")
            held = {id(p): p for p in (*pl_module.parameters(), *pl_module.buffers())}
            self.shard = sum(_local_bytes(p) for p in held.values())

    def start(config: Any, **load: Any) -> tuple[Trainer, int]:
        trainer = trainer_of(world, "/tmp/megapar-hf", 0, empty_init=True, **{**options, **load})
        trainer.callbacks.append(watch)
        data = trainer.strategy.config.resolve(world)[0].data
        module = User(config)
        gc.collect()
        forget_peak()
        before = status_bytes("VmRSS")
        trainer.fit(module, DataLoader(Rows(), batch_size=BATCH // data))
        return trainer, before

    watch = Watch()
    start(config_of("llama"), load_from=None)  # imports what is imported late, connects the ranks
    trainer, before = start(config)
    measured = {"set-up": watch.peak - before, "shard": watch.shard}
    if out is not None:
        gc.collect()
        forget_peak()
        before = status_bytes("VmRSS")
        trainer.strategy.save_hugging_face(out, max_file_bytes=max_file_bytes)
        measured["writing"] = status_bytes("VmHWM") - before
    return measured


def _local_bytes(tensor: Tensor) -> int:
    from lightning_megapar.checkpoint.pieces import local_tensor

    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def filled(module: Any, load_from: Any, exceptions: Any = ()) -> Any:
    """Fill a whole module in this one process, as set-up does; returns it."""
    from lightning_megapar.checkpoint.hugging_face.reading import check_load_from, fill_module, plan_reading
    from lightning_megapar.data_parallel.parameters import ModuleNames
    from lightning_megapar.sharding.blueprint import record_blueprints
    from lightning_megapar.sharding.initialise import initialise_by_name
    from lightning_megapar.strategy.prepare import local_state

    names, blueprints = ModuleNames.record(module), record_blueprints(module)
    readings = plan_reading(module, names, blueprints, check_load_from(load_from), exceptions)
    loaded = frozenset().union(*(reading.names for reading in readings))
    initialise_by_name(module, 0, aliases=names.tied, blueprints=blueprints, loaded=loaded)
    fill_module(readings, local_state(module, names))
    return module


def empty(config: Any, kind: type[User] = BuiltAtOnce) -> Any:
    with torch.device("meta"):
        return kind(config)


def fill_with_one_truncated_file(config: Any, source: str) -> str:
    """On a rank: rank 1's files end early after the plan was made; every rank tells what it raised."""
    import torch.distributed as dist

    from lightning_megapar.checkpoint import CheckpointError
    from lightning_megapar.checkpoint.hugging_face.reading import check_load_from, fill_module, plan_reading
    from lightning_megapar.data_parallel.parameters import ModuleNames
    from lightning_megapar.sharding.blueprint import record_blueprints
    from lightning_megapar.strategy.prepare import local_state

    own = Path(f"{source}-{dist.get_rank()}")
    shutil.copytree(source, own)
    module = BuiltAtOnce(config)
    names = ModuleNames.record(module)
    readings = plan_reading(module, names, record_blueprints(module), check_load_from(own))
    if dist.get_rank() == 1:
        os.truncate(own / "model.safetensors", 9000)
    try:
        fill_module(readings, local_state(module, names))
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def what_lives_after_set_up(config: Any, world: int, options: dict[str, Any]) -> tuple[int, int, int]:
    """On a rank, with a module that was whole on the CPU: bytes before, bytes of its full tensors that are still alive
    after set-up and do not belong to this rank, bytes of its share."""
    import gc
    import weakref

    import transformers

    transformers.logging.set_verbosity_error()
    module = BuiltAtOnce(config)
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    storages = {p.untyped_storage().data_ptr(): weakref.ref(p) for p in module.parameters()}
    trainer = trainer_of(world, "/tmp/megapar-hf", 0, **options)
    data = trainer.strategy.config.resolve(world)[0].data
    trainer.fit(module, DataLoader(Rows(), batch_size=BATCH // data))
    gc.collect()
    own = {id(p): p for p in module.parameters()}
    alive = [r() for r in storages.values() if r() is not None]
    foreign = sum(p.numel() * p.element_size() for p in alive if id(p) not in own and not p.is_meta)
    return whole, foreign, sum(_local_bytes(p) for p in own.values())
