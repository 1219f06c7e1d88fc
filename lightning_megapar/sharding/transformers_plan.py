"""The sharding plans that transformers publishes with its models, with corrections where they are wrong for training.

``PreTrainedModel.tp_plan`` is a mapping in the vocabulary of :mod:`~lightning_megapar.sharding.plan`. It is read off
the module, so that nothing here imports transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_megapar.sharding.names import starred
from lightning_megapar.sharding.plan import STYLES, ShardingPlan

CORRECTIONS: dict[str, dict[str, str]] = {
    "doge": {
        # A row product makes the masks of all heads, of which a rank uses its own.
        "self_attn.dt_proj": "rowwise_scatter_output",
        "self_attn.A": "colwise",
        "self_attn.q_norm": "replicated_with_grad_allreduce",
        "self_attn.k_norm": "replicated_with_grad_allreduce",
    },
    # The forward cuts gate and up out of one product.
    "inkling_text": {"experts.gate_up_proj": "packed_colwise"},
    "inkling2_text": {"experts.gate_up_proj": "packed_colwise"},
    "inkling2_loop_text": {"experts.gate_up_proj": "packed_colwise"},
}
"""``model_type`` -> end of a module's name -> style; found by comparing every gradient with one process (transformers
5.24)."""


PROVEN_WITH = "5.24"
"""Release of transformers whose plans, with :data:`CORRECTIONS`, were compared with one process, gradient by gradient
(``tests/zoo/test_tensor_parallel.py``)."""
PROVEN = frozenset(
    [
        "afmoe",
        "apertus",
        "apertus1p5_text",
        "arcee",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "beam",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_neox",
        "gptj",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hrm_text",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "hyperclovax",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_text",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jamba",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lara_mini",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "sarvam_mla",
        "sarvam_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
        "youtu",
    ]
)
"""``model_type`` of the classes whose plans were exact on two and on four ranks (which share key/value heads).

CodeGen is left out: its fused weight lies in four groups, so that what is right on four ranks is wrong on eight.
"""


def plans_are_proven(module: nn.Module) -> bool:
    """Whether every transformers model below ``module`` is of a class and release whose published plan was proven."""
    models = outermost_models(module).values()
    version = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    return bool(models) and version.startswith(f"{PROVEN_WITH}.") and all(_type_of(m) in PROVEN for m in models)


def _type_of(model: Any) -> str:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return str(getattr(config, "model_type", ""))


def is_transformers_model(module: nn.Module) -> bool:
    """Whether ``module`` is a ``PreTrainedModel``, told by its ancestors' names."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def outermost_models(module: nn.Module) -> dict[str, nn.Module]:
    """Dotted name -> transformers model that is not inside another one."""
    found: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        inside = any(path == outer or path.startswith(outer + ".") or not outer for outer in found)
        if not inside and is_transformers_model(child):
            found[path] = child
    return found


def transformers_plan(module: nn.Module) -> ShardingPlan:
    """The corrected plans of all transformers models below ``module``, under their full names.

    Rules in styles that this package does not know are left out; the module then stays whole (or goes to the chooser).
    """
    plan = ShardingPlan()
    for path, model in outermost_models(module).items():
        published = getattr(model, "tp_plan", None)
        if not isinstance(published, Mapping) or not published:
            continue
        rules = {pattern: style for pattern, style in published.items() if style in STYLES}
        own = ShardingPlan.from_mapping(rules, "transformers")
        fixes = _corrections(model, rules)
        kept = ShardingPlan(tuple(rule for rule in own.rules if rule.pattern not in fixes))
        fixed = ShardingPlan.from_mapping(fixes, "correction")
        plan = plan + (kept + fixed).prefixed(path)
    return plan


def _corrections(model: Any, published: Mapping[str, str]) -> dict[str, str]:
    fixes: dict[str, str] = {}
    for end, style in CORRECTIONS.get(_type_of(model), {}).items():
        names = {starred(name) for name, _ in model.named_modules()}
        names |= {starred(name) for name, _ in model.named_parameters()}
        fixes.update({name: style for name in names if name.endswith("." + end) or name == end})
    return fixes
