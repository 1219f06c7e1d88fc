"""Muon where matrices are cut over tensor or data ranks: the update of the whole matrix, of which each keeps its piece.

Muon orthogonalises the momentum of each matrix (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) by
Newton-Schulz steps, which mix all rows and columns: the orthogonalised piece is not the piece of the orthogonalised
matrix. Here the momentum stays cut as the matrix is, its pieces are gathered over the ranks that share the matrix, and
every rank orthogonalises the whole and keeps its own rows or columns. One matrix at a time, so that a rank holds one
whole matrix more than its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_megapar.config import ConfigError, nearest_name, refuse_unknown
from lightning_megapar.data_parallel.parameters import LogicalParameter, local_tensor
from lightning_megapar.mesh import ParallelMesh, all_gather_single
from lightning_megapar.shards import IndexRuns, ParameterShard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic, by its author: they raise small singular values fastest, and leave all between about 0.7 and 1.2."""
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""What a rate is multiplied by for a matrix: Jordan's, and Liu et al.'s (arXiv 2502.16982), which fits AdamW's rate."""


class Muon(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest, in one optimizer, on any layout.

    A group with ``"adamw": True`` is updated by AdamW: embeddings, heads, biases and norms belong there (Lightning's
    automatic optimization takes one optimizer). Without such a group and on one rank the updates are torch's own
    (``torch.optim.Muon``), to the bit. A fused matrix (query, key and value in one) is one matrix here, as it is there.

        Muon([{"params": matrices}, {"params": others, "adamw": True, "lr": 3e-4}], lr=0.02)

    :meth:`of_module` makes these groups.

    Args:
        params: parameters, or groups of them; those without ``"adamw"`` have two dimensions.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch's;
            ``weight_decay`` is decoupled.
        betas, adam_eps: of groups with ``"adamw"``.
        dtype: of the Newton-Schulz steps. bfloat16, as in torch, is what the method was made for; wider ones are for
            comparisons, because bfloat16 turns the last bit of a gradient into a thousandth of the update.

    Raises:
        ConfigError: a value out of its range; a parameter that is no matrix in a group without ``"adamw"``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"Muon dtype={dtype!r}: expected a floating-point type, such as torch.bfloat16")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw": False,
            "betas": betas,
            "adam_eps": adam_eps,
        }
        known = (*defaults, "params", "param_names", "initial_lr", "max_lr", "min_lr")
        super().__init__(params, defaults)
        self.dtype = dtype
        self._wholes: dict[int, _Whole] = {}
        for index, group in enumerate(self.param_groups):
            refuse_unknown(f"Muon, group {index}", map(str, group), known)
            _check_group(group)
            for number, p in enumerate(group["params"]):
                if not group["adamw"] and p.ndim != 2:
                    names: Any = group.get("param_names")
                    name = names[number] if names else f"parameter {number}"
                    raise ConfigError(
                        f"Muon: {name} of group {index} has the shape {tuple(p.shape)}; Muon orthogonalises matrices. "
                        "Put it into a group with 'adamw': True (Muon.of_module does)"
                    )

    @classmethod
    def of_module(
        cls,
        module: nn.Module,
        lr: float = 0.02,
        adamw_lr: float = 3e-4,
        adamw: Callable[[str, nn.Parameter], bool] | None = None,
        **options: Any,
    ) -> Muon:
        """Matrices of a module by Muon; embeddings, what shares their tables, vectors and stacks of matrices by AdamW.

        Args:
            module: any.
            lr, adamw_lr: of the two kinds.
            adamw: says of a name and parameter that AdamW takes it; by default embeddings (and heads by their names
                ``head``, ``lm_head``, ``output``) and what is no matrix.
            options: of the optimizer.
        """
        tables = {
            id(p)
            for child in module.modules()
            if isinstance(child, nn.Embedding | nn.EmbeddingBag) or "embedding" in type(child).__name__.lower()
            for p in child.parameters(recurse=False)
        }

        def by_default(name: str, p: nn.Parameter) -> bool:
            is_head = any(part in ("head", "lm_head", "output") for part in name.split("."))
            return p.ndim != 2 or id(p) in tables or is_head

        takes = adamw or by_default
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        rest = [(n, p) for n, p in named if takes(n, p)]
        matrices = [(n, p) for n, p in named if not takes(n, p)]
        # Both groups on every stage of a pipeline, even where one of them is empty.
        return cls(
            [{"params": matrices}, {"params": rest, "adamw": True, "lr": adamw_lr, "weight_decay": 0.0}],
            lr=lr,
            **options,
        )

    def place(self, parameters: Iterable[LogicalParameter], mesh: ParallelMesh) -> None:
        """Learn how matrices are cut over the ranks; the strategy calls it in set-up, and when layers have moved.

        Raises:
            ConfigError: a matrix that is cut in a way that cannot be gathered.
        """
        self._wholes = {id(record.parameter): _Whole.of(record, mesh) for record in parameters}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; collective over the ranks that share a matrix."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["adamw"]:
                    self._adamw(group, p)
                else:
                    self._muon(group, p)
        return loss

    def _muon(self, group: dict[str, Any], p: nn.Parameter) -> None:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        piece, gradient, buffer = (_local(one) for one in (p, p.grad, state["momentum_buffer"]))
        whole = self._wholes[id(p)] if self._wholes else _Whole.of_tensor(p)
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        full = whole.gather(update)
        lr = float(group["lr"])
        direction = orthogonal(full, group["ns_coefficients"], group["ns_steps"], group["eps"], self.dtype)
        adjusted = lr * ADJUSTMENTS[group["adjust_lr_fn"] or "original"](*full.shape)
        piece.mul_(1 - lr * group["weight_decay"])
        piece.add_(whole.take(direction).to(piece.dtype), alpha=-adjusted)

    def _adamw(self, group: dict[str, Any], p: nn.Parameter) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        piece, gradient, mean, square = (_local(one) for one in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
        state["step"] += 1
        step, (first, second), lr = float(state["step"]), group["betas"], float(group["lr"])
        piece.mul_(1 - lr * group["weight_decay"])
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (square.sqrt() / (1 - second**step) ** 0.5).add_(group["adam_eps"])
        piece.addcdiv_(mean, size, value=-lr / (1 - first**step))


def _check_group(group: dict[str, Any]) -> None:
    """Refuse values of a group, its own or the defaults, that no step can use.

    Raises:
        ConfigError: naming the option.
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) and math.isfinite(value)

    for name in ("lr", "weight_decay", "eps", "adam_eps"):
        if not is_number(group[name]) or group[name] < 0:
            raise ConfigError(f"Muon {name}={group[name]!r}: expected at least 0, and a finite number")
    for name, numbers in (("momentum", [group["momentum"]]), ("betas", group["betas"])):
        if (name == "betas" and len(numbers) != 2) or not all(is_number(one) and 0 <= one < 1 for one in numbers):
            count = "two numbers" if name == "betas" else "a number"
            raise ConfigError(f"Muon {name}={group[name]!r}: expected {count} from 0 to below 1")
    if len(group["ns_coefficients"]) != 3 or not all(map(is_number, group["ns_coefficients"])):
        raise ConfigError(f"Muon ns_coefficients={group['ns_coefficients']!r}: expected three numbers")
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps < 100:
        raise ConfigError(f"Muon ns_steps={steps!r}: expected 1 to 99, a whole number")
    for name in ("nesterov", "adamw"):
        if not isinstance(group[name], bool):
            raise ConfigError(f"Muon {name}={group[name]!r}: expected True or False")
    if group["adjust_lr_fn"] not in (None, *ADJUSTMENTS):
        near = nearest_name(str(group["adjust_lr_fn"]), ADJUSTMENTS)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"Muon adjust_lr_fn={group['adjust_lr_fn']!r}: expected None, {', '.join(ADJUSTMENTS)}{hint}")


def orthogonal(
    matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Nearly ``U V^T`` of a matrix ``U S V^T``, by Newton-Schulz steps of a quintic: singular values of about 1.

    The same operations as torch's, in any type.

    Args:
        matrix: two-dimensional.
        coefficients: of ``a x + b x^3 + c x^5``.
        steps: iterations.
        eps: least norm to divide by.
        dtype: to compute in.

    Returns:
        of the matrix's shape, in ``dtype``.
    """
    a, b, c = coefficients
    x = matrix.to(dtype, copy=True)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True)
class _Cut:
    """One cut of a matrix: over the ranks of a group."""

    shard: ParameterShard
    group: Any

    def gather(self, piece: Tensor) -> Tensor:
        """The whole from every rank's piece; all-gather of pieces that are padded to one length."""
        index, dim = self.shard.index, self.shard.dim
        longest = max(index.length(rank) for rank in range(index.size))
        rows = piece.movedim(dim, 0).contiguous()
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows
        everyone = padded.new_empty((index.size * longest, *rows.shape[1:]))
        all_gather_single(everyone, padded, group=self.group)
        full = piece.new_empty(self.shard.shape)
        for rank, one in enumerate(everyone.split(longest)):
            index.place(full, one[: index.length(rank)].movedim(0, dim), dim, rank)
        return full


@dataclass(frozen=True)
class _Whole:
    """How the whole of a parameter is put together from the ranks' pieces: inner cuts first."""

    cuts: tuple[_Cut, ...] = ()

    @classmethod
    def of(cls, record: LogicalParameter, mesh: ParallelMesh) -> _Whole:
        parameter, shard = record.parameter, record.shard
        if shard is None and isinstance(parameter, DTensor):
            shard = _tensor_cut(record, parameter, mesh)
        cuts = []
        if record.data_sharded and mesh.shards > 1:
            shape = shard.local_shape if shard is not None else tuple(parameter.shape)
            # FSDP2 cuts what a tensor rank holds along its first dimension, as torch.chunk does.
            rows = IndexRuns.contiguous(shape[0], mesh.shards)
            cuts.append(_Cut(ParameterShard(shape, 0, rows, mesh.shard), mesh.shard_group()))
        if shard is not None:
            cuts.append(_Cut(shard, mesh.group("tensor")))
        return cls(tuple(cuts))

    @classmethod
    def of_tensor(cls, parameter: Tensor) -> _Whole:
        """Of a parameter that no strategy has told of.

        Raises:
            ConfigError: a DTensor, whose ranks are then unknown.
        """
        if isinstance(parameter, DTensor):
            raise ConfigError("lightning_megapar.optim.Muon on DTensors needs strategy='megapar', which places them")
        return cls()

    def gather(self, piece: Tensor) -> Tensor:
        for cut in self.cuts:
            piece = cut.gather(piece)
        return piece

    def take(self, full: Tensor) -> Tensor:
        for cut in reversed(self.cuts):
            full = cut.shard.take(full)
        return full


def _tensor_cut(record: LogicalParameter, parameter: DTensor, mesh: ParallelMesh) -> ParameterShard | None:
    """How a DTensor is cut over the tensor ranks; ``None`` when it is not."""
    names = parameter.device_mesh.mesh_dim_names or ()
    found = [placement for axis, placement in zip(names, parameter.placements) if axis == "tensor"]
    if mesh.size("tensor") == 1 or not found or found[0].is_replicate():
        return None
    if not found[0].is_shard():
        raise ConfigError(f"Muon: {record.name} lies as {found[0]} over the tensor ranks, which it cannot gather")
    dim = getattr(found[0], "dim", Shard(0).dim) % parameter.ndim
    shape = tuple(parameter.shape)
    return ParameterShard(shape, dim, IndexRuns.contiguous(shape[dim], mesh.size("tensor")), mesh.coordinate("tensor"))


def _local(value: Tensor | None) -> Tensor:
    local = local_tensor(value)
    assert local is not None
    return local.detach()
