"""``self.log`` under microbatches and stages: record, reduce, exchange in one packed tensor, replay everywhere.

While a step's microbatches run, Lightning's result collection records instead of logging. Afterwards the last stages'
values, the loss and one flag per rank travel in a single fixed-size all-gather; every rank reduces them in the same
order and logs the same numbers, so that ModelCheckpoint and EarlyStopping agree and no collective hides in a user's
``log``. Names travel only when they change.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_megapar.batches import MARKS, alike, fingerprint, refuse_unlike_batches
from lightning_megapar.mesh import ParallelMesh, all_gather_single
from lightning_megapar.pipeline.cutting.away import Away, present
from lightning_megapar.step.likeness import Unlike, state_of, tolerance_of, unlike

_BATCH, _OUTPUT = 6, 6 + MARKS  # after flag, signature, entries, loss sum, loss weight, capacity wanted
_FIXED = 6 + 2 * MARKS
_COLUMNS = 3  # value, weight, and what tensor ranks must have alike
_REDUCTIONS = ("mean", "sum", "max", "min")


@dataclass
class LogEntry:
    """One ``self.log`` name of a step.

    Args:
        fx, name: hook and metric name.
        options: keyword arguments of the result collection's ``log`` (without the sync functions).
        reduction: ``mean``, ``sum``, ``max`` or ``min``.
        is_metric: a torchmetrics object was logged.
        values, weights: per microbatch; weights are samples (or what the user passed as ``batch_size``).
        explicit_weight: the user passed ``batch_size``.
        dtype: of a logged tensor, ``None`` for a number.
    """

    fx: str
    name: str
    options: dict[str, Any]
    reduction: str
    is_metric: bool
    metric: Metric | None = None
    values: list[Tensor] = field(default_factory=list)
    weights: list[float | Tensor] = field(default_factory=list)
    explicit_weight: bool = False
    dtype: torch.dtype | None = None

    def signature(self) -> str:
        shown = {k: v for k, v in self.options.items() if k not in ("batch_size", "reduce_fx")}
        return f"{self.fx}|{self.name}|{self.reduction}|{self.is_metric}|{self.explicit_weight}|{sorted(shown.items())}"

    def description(self) -> LogEntry:
        """The entry without its values, for other ranks."""
        return replace(self, metric=None, values=[], weights=[])


def _reduction_name(reduce_fx: Any) -> str:
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", str(reduce_fx))
    name = "mean" if name == "avg" else name
    return name if name in _REDUCTIONS else "mean"


class LogRecorder:
    """Collects the entries of one step on one rank."""

    def __init__(self) -> None:
        # A name that a step logs twice has two entries: Lightning keeps the last value of a step, the mean of an epoch.
        self.entries: dict[tuple[str, str, int], LogEntry] = {}
        self._samples = 1.0
        self._seen: Counter[tuple[str, str]] = Counter()

    def begin_microbatch(self, index: int, samples: int) -> None:
        self._seen.clear()
        self._samples = float(samples)

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Stands in for ``_ResultCollection.log`` (same arguments)."""
        for dropped in ("sync_dist_fn", "sync_dist_group", "sync_dist", "enable_graph"):
            options.pop(dropped, None)
        batch_size = options.pop("batch_size", None)
        is_metric = isinstance(value, Metric)
        key = (fx, name, self._seen[fx, name])
        self._seen[fx, name] += 1
        entry = self.entries.get(key)
        if entry is None:
            entry = LogEntry(fx, name, options, _reduction_name(options.get("reduce_fx", "mean")), is_metric)
            entry.explicit_weight = batch_size is not None
            entry.dtype = value.dtype if isinstance(value, Tensor) else None
            self.entries[key] = entry
        if is_metric:
            entry.metric = value
            cached = getattr(value, "_forward_cache", None)
            value = cached if isinstance(cached, Tensor) and cached.numel() == 1 else torch.tensor(float("nan"))
        if isinstance(value, DTensor):  # of a parameter that FSDP2 shards; every data rank logs it
            value = value.full_tensor()
        entry.values.append(value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value)))
        entry.weights.append(float(batch_size) if batch_size is not None else self._samples)

    def complete(self) -> None:
        """In a rehearsal: what was logged is needed here, wherever it is computed."""
        for entry in self.entries.values():
            entry.values = [present(value) for value in entry.values]

    def fill_absent(self) -> list[str]:
        """Put NaN for values that only an earlier pipeline stage has; returns their names."""
        names = []
        for entry in self.entries.values():
            if any(isinstance(value, Away) for value in entry.values):
                names.append(entry.name)
                absent = torch.tensor(float("nan"))
                entry.values = [absent if isinstance(value, Away) else value for value in entry.values]
        return sorted(set(names))

    @contextmanager
    def attached(self, results: Any) -> Iterator[None]:
        """Record every ``log`` on a Lightning result collection (``None``: a hook that cannot log)."""
        if results is None:
            yield
            return
        results.log = self.log
        try:
            yield
        finally:
            del results.log


@dataclass(frozen=True)
class StepReport:
    """What every rank knows after the exchange.

    Args:
        loss: global weighted mean of the microbatch losses (float64), 0 when nothing counts.
        weight: global sum of the loss weights.
        flags: one number per rank.
        entries: descriptions in the order in which they were first logged.
        values, weights: reduced over microbatches and data ranks, per entry.
        unlike: what tensor ranks that share their samples logged differently.
        outputs_unlike: whether such ranks returned different values from the step.
    """

    loss: float
    weight: float
    flags: tuple[float, ...]
    entries: tuple[LogEntry, ...]
    values: tuple[float, ...]
    weights: tuple[float, ...]
    unlike: tuple[Unlike, ...] = ()
    outputs_unlike: bool = False


class LogExchange:
    """Moves a step's packet between ranks.

    Args:
        mesh: the ranks. The packets of the last stage's tensor rank 0, one per data rank, are the ones that count.
        device: where the packet lives.
        compare: whether what tensor ranks log and return is compared; where nothing is cut only figures of each rank
            can differ.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, compare: bool = False) -> None:
        self.mesh = mesh
        self._compares = compare and mesh.size("tensor") > 1
        self.device = device
        self._known: dict[int, tuple[LogEntry, ...]] = {0: ()}
        self._capacity = 16
        last = mesh.loss_stage
        places = [mesh.layout.coordinates(r) for r in range(mesh.layout.world_size)]
        self._speakers = [r for r, p in enumerate(places) if p["pipeline"] == last and p["tensor"] == 0]
        self._speaks = mesh.rank in self._speakers
        self._data_ranks = [p["data"] for p in places]
        # Ranks that share samples and loss, the one that speaks first.
        self._peers = [
            [r for r, p in enumerate(places) if p["pipeline"] == last and p["data"] == places[speaker]["data"]]
            for speaker in self._speakers
        ]

    def exchange(
        self,
        recorder: LogRecorder,
        loss_sum: Tensor | float,
        weight: Tensor | float,
        flag: float,
        batch: Tensor | None = None,
        output: Any = None,
    ) -> StepReport:
        """All ranks call it once per step, with their own packet.

        Args:
            recorder: entries of the local run (only a last stage's count).
            loss_sum: sum of weight x loss over local microbatches.
            weight: sum of the weights.
            flag: any number to be shown to every rank (a stop request).
            batch: its fingerprint; ranks of one data rank must have the same.
            output: what the step returned, where tensor ranks are to be compared.

        Raises:
            RuntimeError: when data ranks logged different names in the same step, or when tensor or pipeline ranks
                saw different batches.
        """
        entries = tuple(recorder.entries.values()) if self.mesh.has_loss else ()
        signature = float(zlib.crc32("\n".join(e.signature() for e in entries).encode())) if entries else 0.0
        packet = self._pack(entries, signature, loss_sum, weight, flag, batch)
        if output is not None and self._compares:
            packet[_OUTPUT:_FIXED] = fingerprint(output, self.device)
        if self.mesh.layout.world_size == 1:
            self._known[int(signature)] = entries
            return self._report([packet.tolist()], int(signature))
        table = self._gather(packet)
        wanted = int(table[self._speakers, 5].max())
        if wanted > self._capacity:
            self._capacity = 2 * wanted
            wider = torch.zeros(_FIXED + _COLUMNS * self._capacity, dtype=packet.dtype, device=packet.device)
            wider[: packet.numel()] = packet
            self._pack_entries(wider, entries)
            table = self._gather(wider)
        refuse_unlike_batches(table[:, _BATCH:_OUTPUT].tolist(), self._data_ranks)
        signatures = set(table[self._speakers, 1].long().tolist())
        if len(signatures) > 1:
            raise RuntimeError(
                f"data ranks logged different names in one step; this rank logged {[e.name for e in entries]}. "
                "Log the same names on every data rank"
            )
        key = signatures.pop()
        # Every rank keeps the same table of signatures, so all of them agree on whether names must travel.
        if key not in self._known:
            box = [tuple(e.description() for e in entries) if self._speaks else None]
            dist.broadcast_object_list(box, src=self._speakers[0])
            assert box[0] is not None
            self._known[key] = box[0]
        report = self._report(table[self._speakers].tolist(), key, tuple(table[:, 0].tolist()))
        return self._compared(table, report) if self._compares else report

    def _compared(self, table: Tensor, report: StepReport) -> StepReport:
        """The report with what tensor ranks have differently. Every rank comes to the same: it has seen all packets."""
        peers = table[torch.tensor(self._peers)]  # (data, tensor, numbers)
        spoken = peers[:, :1]
        marks = peers[..., _OUTPUT:_FIXED]
        outputs_unlike = any(not alike(first, other) for first, *others in marks.tolist() for other in others)
        columns = _FIXED + _COLUMNS * torch.arange(len(report.entries))
        tolerances = torch.tensor([tolerance_of(entry.dtype) for entry in report.entries], dtype=table.dtype)
        apart = unlike(spoken[..., columns + 2], peers[..., columns + 2], tolerances)
        apart &= peers[..., 1:2] == spoken[..., 1:2]  # one that logged other names logs what only rank 0 does, or not
        found: dict[str, Unlike] = {}
        for data, tensor, index in apart.nonzero().tolist():
            entry, at = report.entries[index], columns[index]
            if not entry.options.get("rank_zero_only"):
                values = float(spoken[data, 0, at]), float(peers[data, tensor, at])
                found.setdefault(entry.name, Unlike(entry.name, *values))
        return replace(report, unlike=tuple(found.values()), outputs_unlike=outputs_unlike)

    def _pack(
        self,
        entries: tuple[LogEntry, ...],
        signature: float,
        loss_sum: Tensor | float,
        weight: Tensor | float,
        flag: float,
        batch: Tensor | None,
    ) -> Tensor:
        room = len(entries) if self.mesh.layout.world_size == 1 else self._capacity
        packet = torch.zeros(_FIXED + _COLUMNS * room, dtype=torch.float64)
        packet[0], packet[1], packet[2], packet[5] = flag, signature, len(entries), len(entries)
        packet = packet.to(self.device)
        packet[3], packet[4] = loss_sum, weight
        if batch is not None:
            packet[_BATCH:_OUTPUT] = batch
        self._pack_entries(packet, entries)
        return packet

    def _pack_entries(self, packet: Tensor, entries: tuple[LogEntry, ...]) -> None:
        for index, entry in enumerate(entries[: (packet.numel() - _FIXED) // _COLUMNS]):
            at = _FIXED + _COLUMNS * index
            values = torch.stack([v.to(self.device, torch.float64) for v in entry.values])
            weights = torch.stack([torch.as_tensor(w, dtype=torch.float64, device=self.device) for w in entry.weights])
            if entry.reduction == "mean":
                # What counts for nothing may be no number: a mean over no tokens.
                packet[at] = torch.where(weights > 0, values * weights, 0.0).sum()
            else:
                packet[at] = getattr(values, entry.reduction)()
            packet[at + 1] = weights.sum()
            if self._compares:
                packet[at + 2] = packet[at] if entry.metric is None else state_of(entry.metric, self.device)

    def _gather(self, packet: Tensor) -> Tensor:
        """Every rank's packet, (world, numbers), on the host."""
        world = self.mesh.layout.world_size
        out = torch.empty(world * packet.numel(), dtype=packet.dtype, device=packet.device)
        all_gather_single(out, packet)
        return out.view(world, -1).cpu()

    def _report(self, rows: list[list[float]], key: int, flags: tuple[float, ...] = ()) -> StepReport:
        entries = self._known[key]
        weight = sum(row[4] for row in rows)
        values, weights = [], []
        for index, entry in enumerate(entries):
            at = _FIXED + _COLUMNS * index
            column = [row[at] for row in rows]
            total = sum(row[at + 1] for row in rows)
            weights.append(total)
            if entry.reduction == "mean":
                values.append(sum(column) / total if total else float("nan"))
            elif entry.reduction == "sum":
                values.append(sum(column))
            else:
                values.append(max(column) if entry.reduction == "max" else min(column))
        loss = sum(row[3] for row in rows) / weight if weight else 0.0
        return StepReport(loss, weight, flags or (rows[0][0],), entries, tuple(values), tuple(weights))


def replay(
    trainer: Any, report: StepReport, metrics: dict[str, Metric], device: torch.device, dtype: torch.dtype
) -> None:
    """Log a step's reduced entries on this rank, as if the step had run here on the whole batch.

    Args:
        trainer: Lightning's trainer.
        report: from :class:`LogExchange`.
        metrics: metric attribute name -> the torchmetrics object to log on this rank.
        device: where logged values live.
        dtype: of logged values: float64 under ``64-true``, else float32.
    """
    results = trainer._results
    if results is None:
        return
    connector = trainer._logger_connector
    for entry, value, weight in zip(report.entries, report.values, report.weights):
        # What ``LightningModule.log`` does before it reaches the collection; stages that did not log must do it too.
        if connector.should_reset_tensors(entry.fx):
            results.reset(metrics=False, fx=entry.fx)
        logged: Any
        if entry.is_metric:
            logged = metrics[entry.options["metric_attribute"]]
            logged._forward_cache = torch.tensor(value, dtype=dtype, device=device)
        else:
            logged = torch.tensor(value, dtype=dtype, device=device)
        # Reduced already; without the word Lightning would advise sync_dist=True (its sync function defaults to none).
        results.log(entry.fx, entry.name, logged, batch_size=max(1, round(weight)), sync_dist=True, **entry.options)
        connector._current_fx = entry.fx
