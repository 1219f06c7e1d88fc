"""Thirty planted typos, each refused with file or command line and its neighbour; and no false alarm."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import version
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra

from lightning_megapar.config import FOREIGN_NAMES
from lightning_megapar.hydra_app.schema import PretrainSettings
from lightning_megapar.hydra_app.settings import SettingsCheck, UnknownSettings, refuse_unknown_settings
from lightning_megapar.hydra_app.sources import Found

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(autouse=True)
def hydra_version() -> None:
    version.setbase("1.3")


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the groups that a test may spoil; the command is typed beside it."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(CONF, tmp_path / "conf", ignore=shutil.ignore_patterns("__pycache__")))


def check(conf: Path, *overrides: str, multirun: bool = False, schema: Any = PretrainSettings) -> list[Found]:
    search_path = create_config_search_path(str(conf))
    return SettingsCheck(search_path, "pretrain", schema).run(list(overrides), multirun=multirun)


def experiment(conf: Path, text: str, name: str = "mine") -> str:
    (conf / "experiment" / f"{name}.yaml").write_text("# @package _global_\n" + text)
    return f"experiment={name}"


@dataclass(frozen=True)
class Typo:
    """A misspelt setting and what was meant. ``file`` and ``right`` say where it is planted in place of what."""

    wrong: str
    meant: str
    file: str = ""
    right: str = ""


COMMAND_LINE = [
    Typo("model.num_layrs=8", "model.num_layers"),
    Typo("trainer.max_step=20", "trainer.max_steps"),
    Typo("paralell=tp2", "parallel"),
    Typo("parallel=tp3", "parallel=tp2"),
    Typo("model=gpt_smal", "model=gpt_small"),
    Typo("sede=3", "seed"),
    Typo("data.globl_batch_size=8", "data.global_batch_size"),
    Typo("parallel.tensor_model_parallel_size=2", "parallel.tensor_parallel_size"),
    Typo("num_heads=8", "model.num_heads"),
    Typo("+trainer.limit_trian_batches=3", "trainer.limit_train_batches"),
]
GROUP_FILES = [
    Typo("num_haeds", "model.num_heads", "model/gpt_small.yaml", "num_heads"),
    Typo("hiden_size", "model.hidden_size", "model/gpt_small.yaml", "hidden_size"),
    Typo("warmup_step", "optimizer.warmup_steps", "optimizer/adamw.yaml", "warmup_steps"),
    Typo("weigth_decay", "optimizer.weight_decay", "optimizer/adamw.yaml", "weight_decay"),
    Typo("gradient_clip_value", "trainer.gradient_clip_val", "trainer/default.yaml", "gradient_clip_val"),
    Typo("accumulate_grad_batch", "trainer.accumulate_grad_batches", "trainer/default.yaml", "accumulate_grad_batches"),
    Typo("seq_length", "data.sequence_length", "data/stdlib.yaml", "sequence_length"),
    Typo("tp_size", "parallel.tensor_parallel_size", "parallel/tp2_pp2.yaml", "tensor_parallel_size"),
    Typo("nmae", "schedule.name", "schedule/1f1b.yaml", "name"),
    Typo("save_topk", "callbacks.checkpoint.save_top_k", "callbacks/default.yaml", "save_top_k"),
]
EXPERIMENT_FILE = [
    Typo("model:\n  num_layer: 8\n", "model.num_layers"),
    Typo("sed: 3\n", "seed"),
    Typo("trainer:\n  val_check_intervall: 5\n", "trainer.val_check_interval"),
    Typo("optimiser:\n  lr: 1.0\n", "optimizer"),
    Typo("optimizer:\n  learning_rate: 1.0\n", "optimizer.lr"),
    Typo("parallel:\n  zero_stge: 1\n", "parallel.zero_stage"),
    Typo("data:\n  path: notes.txt\n", "data.source"),
    Typo("defaults:\n  - override /paralel: dp2\n", "override /parallel"),
    Typo("defaults:\n  - override /model: llama_tny\n", "llama_tiny"),
    Typo("callbacks:\n  checkpoint:\n    monitr: val_loss\n", "callbacks.checkpoint.monitor"),
]


def plant(conf: Path, typo: Typo) -> None:
    """Misspell a key of a group file where it stands."""
    path = conf / typo.file
    text = path.read_text()
    assert f"{typo.right}: " in text
    path.write_text(text.replace(f"{typo.right}: ", f"{typo.wrong}: ", 1))


def test_thirty_planted_typos_are_refused_and_their_neighbours_named(conf: Path) -> None:
    assert check(conf) == []
    named = {}
    for typo in COMMAND_LINE:
        found = check(conf, typo.wrong)
        assert [entry.where for entry in found] == ["command line"], typo
        named[typo] = found[0].near
    for typo in EXPERIMENT_FILE:
        found = check(conf, experiment(conf, typo.wrong))
        assert len(found) == 1 and found[0].where.startswith("conf/experiment/mine.yaml:"), (typo, found)
        named[typo] = found[0].near
    for typo in GROUP_FILES:
        original = (conf / typo.file).read_text()
        plant(conf, typo)
        found = [entry for entry in check(conf) if entry.text == "unknown setting"]
        assert len(found) == 1 and found[0].where.startswith(f"conf/{typo.file}:"), (typo, found)
        assert found[0].setting.endswith(typo.wrong)
        named[typo] = found[0].near
        (conf / typo.file).write_text(original)
    assert len(named) == 30
    wrong = {typo.wrong: near for typo, near in named.items() if near != typo.meant}
    assert len(wrong) <= 3, wrong


def test_everything_is_found_at_once_with_its_line(conf: Path) -> None:
    plant(conf, GROUP_FILES[0])
    plant(conf, GROUP_FILES[3])
    name = experiment(conf, "defaults:\n  - override /modl: gpt_tiny\nmodel:\n  num_layrs: 3\nsed: 3\n")
    found = check(conf, name, "parallel=tp3", "trainer.max_step=2")
    assert {(entry.setting, entry.where) for entry in found} == {
        ("parallel=tp3", "command line"),
        ("trainer.max_step", "command line"),
        ("override modl", "conf/experiment/mine.yaml:3"),
        ("model.num_layrs", "conf/experiment/mine.yaml:5"),
        ("sed", "conf/experiment/mine.yaml:6"),
        ("model.num_haeds", "conf/model/gpt_small.yaml:5"),
        ("optimizer.weigth_decay", "conf/optimizer/adamw.yaml:5"),
    }
    assert str(found[1]).startswith("unknown") and "did you mean" in str(UnknownSettings(found))


def test_every_option_of_every_group_composes_without_an_alarm(conf: Path) -> None:
    groups = {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in conf.iterdir() if p.is_dir()}
    del groups["hydra"], groups["strategy"]
    assert groups["parallel"] == sorted(
        ["auto", "single", "dp2", "tp2", "pp2", "dp2_tp2", "dp2_pp2", "tp2_pp2", "dp2_tp2_pp2"]
    )
    longest = max(len(options) for options in groups.values())
    for index in range(longest):  # each option at least once, all groups changed at the same time
        chosen = [f"{group}={options[index % len(options)]}" for group, options in groups.items()]
        if "data=text" in chosen:
            chosen.append("data.source=notes.txt")
        assert check(conf, *chosen) == [], chosen


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_layers=8", "trainer.gradient_clip_val=null", "optimizer.betas=[0.8,0.9]"],
        ["+trainer.limit_train_batches=3", "++trainer.max_steps=3", "++trainer.profiler=simple"],
        ["~callbacks.sample_text", "hydra.job.chdir=false", "hydra/job_logging=disabled"],
        ["+callbacks.lr={_target_: lightning.pytorch.callbacks.LearningRateMonitor, logging_interval: step}"],
        ["model={num_layers: 8}", "parallel.pipeline_split=[1,3]", "run_dir='a/b c'", "resume=runs/x"],
        ["parallel=pp2", "parallel.rebalance={min_gain: 0.2}"],
        ["parallel=dp2_pp2", "parallel.rebalance=[layers,replicas]"],
        ["callbacks.checkpoint.every_n_train_steps=5"],
    ],
)
def test_right_commands_pass(conf: Path, overrides: list[str]) -> None:
    if overrides == ["callbacks.checkpoint.every_n_train_steps=5"]:
        [found] = check(conf, *overrides)  # a right name that no file sets: the message says what to type
        assert "type +callbacks.checkpoint.every_n_train_steps=5" in str(found)
        overrides = ["+" + overrides[0]]
    assert check(conf, *overrides) == []


def test_an_experiment_may_choose_another_option_and_change_it(conf: Path) -> None:
    text = "defaults:\n  - override /model: llama_tiny\n  - override /optimizer: sgd\noptimizer:\n  momentum: 0.5\n"
    assert check(conf, experiment(conf, text)) == []
    # In an application without a schema as well: momentum is a setting of `sgd`, not of the default `adamw`.
    assert check(conf, experiment(conf, text), schema=None) == []
    [found] = check(conf, experiment(conf, text + "trainr:\n  max_steps: 3\n"), schema=None)
    assert (found.setting, found.near, found.where) == ("trainr", "trainer", "conf/experiment/mine.yaml:7")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_layers=many", "'model.num_layers' is 'many'; expected a whole number"),
        ("trainer.max_steps=1.5", "'trainer.max_steps' is 1.5; expected a whole number"),
        ("parallel.zero_stage=true", "'parallel.zero_stage' is True; expected a whole number"),
        ("seed=abc", "'seed' is 'abc'; expected a whole number (command line)"),
        ("parallel.sequence_parallel=1", "'parallel.sequence_parallel' is 1; expected true or false"),
        ("schedule.name=zero_bubble", "expected 'gpipe' or '1f1b' or 'interleaved_1f1b'"),
        ("optimizer.betas=3", "'optimizer.betas' is 3; expected a list"),
        ("data=text", "'data.source' must be given (conf/data/text.yaml:3)"),
        ("~model", "'model' is missing"),
        ("~modl", "unknown setting 'modl' (command line); did you mean 'model'?"),
        ("+seed=3", "type seed=3"),
        ("+model=gpt_tiny", "type model=gpt_tiny"),
        ("experiment=null", "type ~experiment"),
        ("model=gpt_tiny,gpt_small", "Add -m"),
        ("model={num_layers: 3, num_hads: 3}", "unknown setting 'model.num_hads'"),
        ("hydra.job.chdr=true", "did you mean 'hydra.job.chdir'?"),
        ("hydra/launcher=bsic", "did you mean 'hydra/launcher=basic'?"),
        ("model.num_layers", "is not an override"),
        ("data.sequence_length=${model.max_sequence_len}", "which refers to nothing"),
        (
            "model._target_=lightning_megapar.models.gpt.GPTConfg",
            "did you mean 'lightning_megapar.models.gpt.GPTConfig'",
        ),
    ],
)
def test_what_each_mistake_is_told(conf: Path, override: str, said: str) -> None:
    found = check(conf, override)
    assert len(found) == 1 and said in str(found[0]), [str(entry) for entry in found]


def test_names_of_other_frameworks_lead_to_ours(conf: Path) -> None:
    found = check(conf, *[f"+parallel.{name}=2" for name in FOREIGN_NAMES])
    assert len(found) == len(FOREIGN_NAMES)
    for entry in found:
        meant = FOREIGN_NAMES[entry.setting.removeprefix("parallel.")].split()[0]
        assert entry.near == f"{'trainer' if meant.startswith('acc') else 'parallel'}.{meant}", entry


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("model: [1, 2\n", "is no YAML", 3),
        ("seed: 3\nseed: 4\n", "found duplicate key seed", 3),
        ("default:\n  - override /model: gpt_tiny\n", "did you mean 'defaults'?", 2),
        ("defaults:\n  - override schedule: gpipe\n", "did you mean 'override /schedule'?", 3),
        ("hydra:\n  jobb:\n    chdir: true\n", "did you mean 'hydra.job'?", 3),
        ("callbacks:\n  mine:\n    _targt_: x.y\n", "did you mean 'callbacks.mine._target_'?", 4),
        ("trainer:\n  strategy:\n    timeout_second: 3\n", "did you mean 'trainer.strategy.timeout_seconds'?", 4),
        ("callbacks:\n  a:\n    _target_: lightning.pytorch.callbacks.Timr\n", "lightning.pytorch.callbacks.Timer", 4),
    ],
)
def test_mistakes_in_a_file_come_with_its_line(conf: Path, text: str, said: str, line: int) -> None:
    found = check(conf, experiment(conf, text))
    assert len(found) == 1 and said in str(found[0]), [str(entry) for entry in found]
    assert f"conf/experiment/mine.yaml:{line}" in str(found[0])


def test_each_option_of_a_sweep_is_checked(conf: Path) -> None:
    experiment(conf, "model:\n  num_layrs: 3\n")
    sweep = ["model=gpt_tiny,gpt_smal", "seed=1,2", "experiment=llama_zero1,mine", "parallel=glob(tp*)"]
    found = {entry.setting: entry.near for entry in check(conf, *sweep, multirun=True)}
    assert found == {"model=gpt_smal": "model=gpt_small", "model.num_layrs": "model.num_layers"}
    assert check(conf, "seed=range(3)", "model=gpt_tiny", multirun=True) == []


def test_a_misspelt_primary_configuration(conf: Path) -> None:
    [found] = SettingsCheck(create_config_search_path(str(conf)), "pretrian", PretrainSettings).run([])
    assert found.near == "pretrain"


def test_files_of_a_foreign_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No schema: what its files define is known, an overlay may only change that; lists are looked into."""
    conf = tmp_path / "conf"
    (conf / "experiment").mkdir(parents=True)
    (conf / "pretrain.yaml").write_text(
        "defaults:\n  - _self_\n  - experiment: null\nfree: {a: 1}\n"
        "timers:\n  - {_target_: lightning.pytorch.callbacks.Timer, duration: '00:01:00:00'}\n"
        "  - {_target_: lightning.pytorch.callbacks.Timer, duratoin: '00:01:00:00'}\n"
    )
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\nfree:\n  a: 2\n  b: 3\nnew: 1\n")
    monkeypatch.chdir(tmp_path)
    found = {entry.setting: entry.near for entry in check(conf, "experiment=mine", "+added.by.hand=3", schema=None)}
    assert found == {"free.b": None, "new": None, "timers[1].duratoin": "timers[1].duration"}


@pytest.fixture
def running_task(conf: Path) -> Iterator[Any]:
    """What a task sees inside ``@hydra.main``: its configuration, with Hydra's singletons set."""
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    def start(*overrides: str) -> Any:
        with_hydra = compose("pretrain", overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(with_hydra)
        task = with_hydra.copy()
        OmegaConf.set_struct(task, False)
        del task["hydra"]
        return task

    with initialize_config_dir(str(conf), version_base="1.3"):
        yield start
    HydraConfig.instance().cfg = None
    GlobalHydra.instance().clear()


def test_from_inside_a_task(conf: Path, running_task: Any) -> None:
    refuse_unknown_settings(running_task("model=gpt_tiny"), PretrainSettings)
    task = running_task(experiment(conf, "model:\n  num_layrs: 3\n"))
    with pytest.raises(UnknownSettings, match=r"num_layrs' \(conf/experiment/mine.yaml:3\); did you mean"):
        refuse_unknown_settings(task, PretrainSettings)
    task = running_task()
    task.model.num_headz = 3  # a program may change its settings as well
    with pytest.raises(UnknownSettings, match=r"num_headz.*did you mean 'model.num_heads'"):
        refuse_unknown_settings(task, PretrainSettings)


def test_the_thirty_are_thirty_different_mistakes() -> None:
    planted = list(itertools.chain(COMMAND_LINE, GROUP_FILES, EXPERIMENT_FILE))
    assert len({(typo.wrong, typo.file) for typo in planted}) == 30
