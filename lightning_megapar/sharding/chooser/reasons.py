"""Why a plan leaves a module whole, in words for the table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_megapar.layers.foreign import computed_weight, is_linear
from lightning_megapar.sharding.chooser.survey import Survey
from lightning_megapar.sharding.names import BlockNames
from lightning_megapar.sharding.plan import ShardingPlan, resolve


def compiled_parts(module: nn.Module) -> set[str]:
    """Names of what lies in modules that ``torch.compile`` has wrapped: no hook and no style reaches a trace."""
    found: set[str] = set()
    for path, child in module.named_modules():
        if type(child).__name__ == "OptimizedModule" and type(child).__module__.startswith("torch._dynamo"):
            found.update(".".join(filter(None, (path, inner))) for inner, _ in child.named_modules())
    return found


def why_whole(module: nn.Module, plan: ShardingPlan, seen: Survey, told: Mapping[str, str]) -> dict[str, str]:
    """Starred name -> reason, for every module with matrices of its own that no rule of the plan names.

    Args:
        module: whole.
        plan: what was chosen.
        seen: what one run showed.
        told: starred name -> reason that trials gave.
    """
    star = BlockNames(dict(module.named_modules())).star
    named = {one.path for one in resolve(plan, module, strict=False)} if plan.rules else set()
    compiled = compiled_parts(module)
    reasons: dict[str, str] = {}
    for path, child in module.named_modules():
        matrices = any(p is not None and p.ndim > 1 for p in child._parameters.values())
        computed = is_linear(child) and computed_weight(child)  # its matrices lie in a child; it is named itself
        if path in named or ".parametrizations" in path or not (matrices or computed):
            continue
        reasons.setdefault(star(path), _why(path, child, seen, compiled, told.get(star(path), "")))
    return reasons


def _why(path: str, child: nn.Module, seen: Survey, compiled: set[str], told: str) -> str:
    kind = type(child).__name__
    if path in compiled:
        return "inside torch.compile(module): call module.compile() instead, or compile after the cut"
    if is_linear(child) and (source := computed_weight(child)):
        return f"its weight is computed by {source}"
    if told:
        return told
    if path in seen.mapped:
        return "called inside torch.func.vmap"
    if path not in seen.called:
        return "its parameters are read without a call of the module (such as einsum), or not at all"
    if is_linear(child) or isinstance(child, nn.Embedding):
        return "too small to be worth a cut"
    return f"no layout is known for a {kind}"
