"""Helpers that run on the ranks of the pool: compare a sharded module with the whole one."""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megapar.layers import ParallelLayer
from lightning_megapar.sharding import shard_module


def tensor_mesh() -> DeviceMesh | None:
    """All ranks of the task as one tensor axis; ``None`` for one rank."""
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def for_examples(strategy: SearchStrategy[Any], check: Callable[[Any], None], max_examples: int = 40) -> None:
    """Run ``check`` on examples drawn from ``strategy``, the same ones on every rank.

    The ranks agree on each verdict, so that all of them fail, shrink and report together.
    """

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        failure = None
        torch.manual_seed(0)  # whole layers draw their values from it: the ranks must hold the same ones
        try:
            check(example)
        except Exception:
            failure = traceback.format_exc()
        failed = torch.tensor(float(failure is not None))
        if dist.is_initialized():
            dist.all_reduce(failed)
        if failed:
            verdicts = [failure]
            if dist.is_initialized():
                verdicts = [None] * dist.get_world_size()
                dist.all_gather_object(verdicts, failure)
            raise AssertionError(next(text for text in verdicts if text))

    run()


def partial_names(module: nn.Module) -> set[str]:
    """Dotted names of the parameters whose gradient is an addend on each rank."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, layer in module.named_modules()
        if isinstance(layer, ParallelLayer)
        for name in layer.partial_gradients()
    }


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter's full gradient, on every rank, by one collective; partial ones are summed.

    A replicated gradient that is not declared partial must be the same on all ranks: this is checked.
    """
    local: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.shape == parameter.shape and gradient.dtype == parameter.dtype, name
        if isinstance(parameter, DTensor):
            assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements, name
            gradient = gradient.to_local()
        local[name] = gradient.detach().clone()
    if not any(isinstance(p, DTensor) for p in module.parameters()):
        return local
    flat = torch.cat([g.reshape(-1).double() for g in local.values()])  # exact for every dtype in use
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    partial, result, start = partial_names(module), {}, 0
    for name, parameter in module.named_parameters():
        count = local[name].numel()
        pieces = [g[start : start + count].view(local[name].shape).to(local[name].dtype) for g in gathered]
        start += count
        placement = parameter.placements[0]
        if isinstance(placement, Shard):
            assert name not in partial, f"{name} is cut and cannot be partial"
            result[name] = torch.cat(pieces, dim=placement.dim)
        elif name in partial:
            result[name] = torch.stack(pieces).sum(0)
        else:
            assert all(torch.equal(pieces[0], other) for other in pieces), f"{name}: undeclared partial gradient"
            result[name] = pieces[0]
    return result


def integers(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers from -4 to 4: their sums of products are exact in float32 in any order."""
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def perturb(module: nn.Module, generator: torch.Generator, exact: bool = False) -> nn.Module:
    """Values that hide nothing: zero biases and unit norms would forgive a bias added twice or a missing sum."""
    with torch.no_grad():
        for parameter in module.parameters():
            if exact:
                parameter.copy_(integers(tuple(parameter.shape), generator))
            else:
                noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(generator=generator)
                parameter.add_(0.1 * noise.to(parameter.dtype))
    return module


def piece(x: Tensor, layout: str, rank: int, size: int) -> Tensor:
    """A rank's part of a whole tensor: ``whole``, ``columns`` (last dim) or ``sequence`` (dim -2)."""
    if layout == "whole" or size == 1:
        return x
    return x.chunk(size, dim=-1 if layout == "columns" else -2)[rank]


def same(got: Tensor, expected: Tensor, exact: bool, what: str, tolerance: float = 1e-12, floor: float = 1e-6) -> None:
    """Bit equality, or a maximum error relative to the largest expected value (``floor`` at least)."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} for {tuple(expected.shape)}"
    if exact:
        assert torch.equal(got, expected), f"{what} differs: {(got - expected).abs().max().item()}"
    elif expected.numel():
        error = ((got - expected).abs().max() / expected.abs().max().clamp(min=floor)).item()
        assert error <= tolerance, f"{what}: relative error {error:.3g}"


def compare(
    layer: nn.Module,
    inputs: Tensor,
    upstream: Callable[[Tensor], Tensor],
    *,
    sequence_parallel: bool = False,
    input_layout: str = "whole",
    output_layout: str = "whole",
    exact: bool = True,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
    reference: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> None:
    """Outputs, input gradients and all parameter gradients of ``layer``, whole and sharded over all ranks.

    Args:
        layer: a whole layer.
        inputs: whole input; integer inputs have no gradient.
        upstream: makes the whole gradient of the whole output.
        sequence_parallel, input_layout, output_layout: how the sharded layer's input and output are cut.
        exact: bit equality, else 1e-12.
        call: runs the sharded module on its part of the input.
        reference: runs the whole one; ``call`` by default.
    """
    mesh = tensor_mesh()
    rank, size = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    sharded = copy.deepcopy(layer)
    shard_module(sharded, mesh, sequence_parallel)

    x = inputs.clone().requires_grad_(inputs.is_floating_point())
    expected = (reference or call)(layer, x)
    gradient = upstream(expected)
    expected.backward(gradient)

    x_own = piece(inputs, input_layout, rank, size).clone().requires_grad_(inputs.is_floating_point())
    got = call(sharded, x_own)
    same(got.detach(), piece(expected.detach(), output_layout, rank, size), exact, "output")
    got.backward(piece(gradient, output_layout, rank, size).contiguous())
    if x.grad is not None:
        assert x_own.grad is not None
        same(x_own.grad, piece(x.grad, input_layout, rank, size), exact, "input gradient")
    same_gradients(sharded, layer, exact)


def same_gradients(sharded: nn.Module, layer: nn.Module, exact: bool = False, tolerance: float = 1e-12) -> None:
    """Every gathered gradient of ``sharded`` against the whole ``layer``'s.

    A gradient that is zero but for rounding (a key projection's bias) is compared with the module's largest.
    """
    gradients = full_gradients(sharded)
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert gradients.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        assert gradient is not None
        same(gradients[name], gradient, exact, f"gradient of {name}", tolerance, max(1e-2 * largest, 1e-6))


class CollectiveCounter(TorchDispatchMode):
    """Counts dispatched collectives by kind, and the bytes of the full-size side of each (input or output)."""

    KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            kind = next((k for part, k in self.KINDS.items() if part in name), name)
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
            self.calls[kind, max(t.numel() * t.element_size() for t in tensors)] += 1
        return func(*args, **(kwargs or {}))
