"""Executes a schedule on one stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_megapar.mesh import ParallelMesh
from lightning_megapar.pipeline.exchange import Channel
from lightning_megapar.pipeline.schedules import Schedule

ForwardStep = Callable[[int, Any], tuple[bool, Any]]
BackwardStep = Callable[[int, Any], None]


class PipelineRuntime:
    """Runs the actions of a stage and moves boundaries and their gradients between neighbours.

    Args:
        mesh: the ranks; with pipeline size 1 nothing is sent.
        device: where boundaries live.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self.stage = mesh.coordinate("pipeline")
        self.num_stages = mesh.size("pipeline")
        self.forward_in = self.forward_out = self.backward_in = self.backward_out = None
        if self.num_stages > 1:
            forward, backward = mesh.direction_group("forward"), mesh.direction_group("backward")
            if self.stage > 0:
                previous = mesh.stage_rank(self.stage - 1)
                self.forward_in = Channel(previous, forward, device)
                self.backward_out = Channel(previous, backward, device)
            if self.stage < self.num_stages - 1:
                following = mesh.stage_rank(self.stage + 1)
                self.forward_out = Channel(following, forward, device)
                self.backward_in = Channel(following, backward, device)
            # Stage by stage, so that no two ranks wait for each other.
            if self.forward_in is not None and self.backward_out is not None:
                self.forward_in.warm_up(send=False)
                self.backward_out.warm_up(send=True)
            if self.forward_out is not None and self.backward_in is not None:
                self.forward_out.warm_up(send=True)
                self.backward_in.warm_up(send=False)

    def run(
        self,
        schedule: Schedule,
        forward: ForwardStep,
        backward: BackwardStep | None = None,
        before_last_backward: Callable[[], None] | None = None,
        before_backward: Callable[[int], None] | None = None,
    ) -> None:
        """Run one step.

        Args:
            schedule: actions per stage; its stage count is this pipeline's.
            forward: ``(microbatch, received boundary or None) -> (finished, value)``; ``finished`` with the step's
                result on the last stage, else the boundary to send.
            backward: on the last stage, ``(microbatch, result) -> None`` runs the backward of that microbatch's loss.
            before_last_backward: called once before the step's last backward (gradient reduction starts with it).
            before_backward: called with the microbatch before each of its backwards.
        """
        inputs: dict[int, list[Tensor]] = {}
        outputs: dict[int, list[Tensor]] = {}
        results: dict[int, Any] = {}
        actions = schedule.ranks[self.stage]
        last_backward = max((i for i, a in enumerate(actions) if a.kind == "backward"), default=-1)
        training = last_backward >= 0
        for index, action in enumerate(actions):
            microbatch = action.microbatch
            if action.kind == "forward":
                received, leaves = (None, []) if self.forward_in is None else self.forward_in.receive()
                finished, value = forward(microbatch, received)
                if training:
                    inputs[microbatch] = leaves
                if finished:
                    if training:
                        results[microbatch] = value
                else:
                    assert self.forward_out is not None
                    sent = self.forward_out.send(value)
                    if training:
                        outputs[microbatch] = [t for t in sent if t.requires_grad]
                continue
            if index == last_backward and before_last_backward is not None:
                before_last_backward()
            if before_backward is not None:
                before_backward(microbatch)
            if self.backward_in is None:
                assert backward is not None
                backward(microbatch, results.pop(microbatch))
            else:
                tensors = outputs.pop(microbatch)
                gradients = [self.backward_in.receive_tensor(tuple(t.shape), t.dtype) for t in tensors]
                if tensors:
                    torch.autograd.backward(tensors, gradients)
                del tensors, gradients
            if self.backward_out is not None:
                for leaf in inputs.pop(microbatch):
                    self.backward_out.send_tensor(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        for channel in (self.forward_out, self.backward_out):
            if channel is not None:
                channel.drain()
