"""A cluster as data, and what a collective and a kernel cost on it. Pure functions, no torch.

Every time is in seconds, every size in bytes, every rate per second and per device. A message of ``m`` bytes over a
link takes ``alpha + m / beta`` (latency and bandwidth: Hockney, "The communication challenge for MPP", 1994). The
collectives are rings; with ``n`` ranks and ``m`` bytes:

=================== ============================= ====================================================
collective          seconds                       ``m`` counts
=================== ============================= ====================================================
``all_reduce``      ``2 (n-1) (alpha + m/n/beta)``  the tensor, whole on every rank
``all_gather``      ``(n-1) (alpha + m/n/beta)``    the gathered tensor
``reduce_scatter``  ``(n-1) (alpha + m/n/beta)``    the tensor before it is scattered
``all_to_all``      ``(n-1) (alpha + m/n/beta)``    what one rank holds
``send``            ``alpha + m/beta``              the message
=================== ============================= ====================================================

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1),
2005; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
The time of the additions inside a reduction is part of the fitted ``beta``. A library that departs from the ring is
described by a factor per collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lightning_megapar.config import AXES, ConfigError, Layout, nearest_name, refuse_unknown

ELEMENT_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element by dtype name."""
_LONG_NAMES = {"float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16"}
_LONG_NAMES |= {"float16": "fp16", "half": "fp16"}


COLLECTIVES: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def dtype_name(dtype: object) -> str:
    """``"bf16"``, ``"bfloat16"`` or ``torch.bfloat16`` -> ``"bf16"``.

    Raises:
        ConfigError: for a dtype that is not a floating one of :data:`ELEMENT_BYTES`.
    """
    name = str(dtype).removeprefix("torch.")
    name = _LONG_NAMES.get(name, name)
    if name not in ELEMENT_BYTES:
        near = nearest_name(name, [*ELEMENT_BYTES, *_LONG_NAMES])
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"dtype={dtype!s} is not one of {', '.join(ELEMENT_BYTES)}{hint}")
    return name


def _number(name: str, value: Any, *, zero: bool = False) -> float:
    """``value`` as a float. YAML 1.1 reads ``1e-6`` as text, so text that is a number counts as one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or math.isnan(number) or number < 0 or (number == 0 and not zero):
        wanted = "a number of 0 or more" if zero else "a positive number"
        raise ConfigError(f"{name}={value!r}: expected {wanted}")
    return number


@dataclass(frozen=True)
class Link:
    """What joins two ranks.

    Args:
        latency: alpha, seconds that a message takes however short it is.
        bandwidth: beta, bytes/s in one direction, per device, while every device of a node sends.

    Raises:
        ConfigError: unless ``latency >= 0`` and ``bandwidth > 0``.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency", _number("latency", self.latency, zero=True))
        object.__setattr__(self, "bandwidth", _number("bandwidth", self.bandwidth))

    @classmethod
    def of(cls, value: Link | Mapping[str, Any], name: str = "link") -> Link:
        """A link, or the mapping ``{latency, bandwidth}`` as one; errors name the setting ``name``."""
        if isinstance(value, Link):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r}: expected a mapping with latency and bandwidth")
        names = [f.name for f in fields(cls)]
        refuse_unknown(name, value, names)
        missing = [n for n in names if n not in value]
        if missing:
            raise ConfigError(f"{name}: {' and '.join(missing)} missing")
        try:
            return cls(**value)
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from error


@dataclass(frozen=True)
class Ring:
    """``size`` ranks that communicate over ``link``, the slowest on their way round. One rank costs nothing.

    Args:
        size: one or more.
        link: between neighbours.
        factors: collective -> its time over that of the ring; 1 where nothing is said.
    """

    size: int
    link: Link
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ConfigError(f"size={self.size!r}: a ring has one rank or more")

    def _rounds(self, name: str, rounds: int, nbytes: float) -> float:
        return self.factors.get(name, 1.0) * rounds * (self.link.latency + nbytes / self.size / self.link.bandwidth)

    def all_reduce(self, nbytes: float) -> float:
        return self._rounds("all_reduce", 2 * (self.size - 1), nbytes)

    def all_gather(self, nbytes: float) -> float:
        return self._rounds("all_gather", self.size - 1, nbytes)

    def reduce_scatter(self, nbytes: float) -> float:
        return self._rounds("reduce_scatter", self.size - 1, nbytes)

    def all_to_all(self, nbytes: float) -> float:
        return self._rounds("all_to_all", self.size - 1, nbytes)

    def send(self, nbytes: float) -> float:
        return self.link.latency + nbytes / self.link.bandwidth if self.size > 1 else 0.0


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. Ranks are numbered node by node.

    Args:
        devices_per_node, nodes: how many there are.
        peak_flops: FLOP/s of one device: one number, or one per dtype (``{"bf16": 312e12, "fp32": 19.5e12}``).
        memory_bandwidth: bytes/s between a device and its memory.
        intra_node, inter_node: links inside a node and between two.
        launch_seconds: what a kernel costs before it does any work.
        efficiency: share of the peak that a large matrix product reaches, in (0, 1].
        axis_links: links that replace the two for one mesh axis of :data:`lightning_megapar.config.AXES`.
        collective_factors: time over that of the ring for one of :data:`COLLECTIVES`; gloo's reduce-scatter, for
            one, takes as long as its all-reduce: ``{"reduce_scatter": 2}``.
        name: for tables.

    Raises:
        ConfigError: on a value outside its range, an unknown axis, collective or dtype.
    """

    devices_per_node: int
    nodes: int
    peak_flops: float | Mapping[str, float]
    memory_bandwidth: float
    intra_node: Link
    inter_node: Link
    launch_seconds: float = 0.0
    efficiency: float = 1.0
    axis_links: Mapping[str, Link] = field(default_factory=dict)
    collective_factors: Mapping[str, float] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a positive integer (nearest valid: 1)")
        if isinstance(self.peak_flops, Mapping):
            if not self.peak_flops:
                raise ConfigError("peak_flops={}: expected a number or one number per dtype")
            rates = {dtype_name(d): _number(f"peak_flops.{d}", v) for d, v in self.peak_flops.items()}
            object.__setattr__(self, "peak_flops", rates)
        else:
            object.__setattr__(self, "peak_flops", _number("peak_flops", self.peak_flops))
        for name in ("memory_bandwidth", "efficiency"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        object.__setattr__(self, "launch_seconds", _number("launch_seconds", self.launch_seconds, zero=True))
        if self.efficiency > 1:
            raise ConfigError(f"efficiency={self.efficiency}: a share of the peak is at most 1 (nearest valid: 1)")
        for name in ("intra_node", "inter_node"):
            object.__setattr__(self, name, Link.of(getattr(self, name), name))
        if not isinstance(self.axis_links, Mapping):
            raise ConfigError(f"axis_links={self.axis_links!r}: expected a mapping from axis to link")
        refuse_unknown("axis_links", self.axis_links, AXES)
        links = {axis: Link.of(link, f"axis_links.{axis}") for axis, link in self.axis_links.items()}
        object.__setattr__(self, "axis_links", links)
        if not isinstance(self.collective_factors, Mapping):
            raise ConfigError(f"collective_factors={self.collective_factors!r}: expected a mapping to numbers")
        refuse_unknown("collective_factors", self.collective_factors, COLLECTIVES)
        factors = {n: _number(f"collective_factors.{n}", f) for n, f in self.collective_factors.items()}
        object.__setattr__(self, "collective_factors", factors)

    @property
    def devices(self) -> int:
        return self.devices_per_node * self.nodes

    def flops_per_second(self, dtype: object) -> float:
        """What a large matrix product in ``dtype`` reaches.

        Raises:
            ConfigError: when the description has no figure for ``dtype``.
        """
        rates = self.peak_flops
        if not isinstance(rates, Mapping):
            return self.efficiency * rates
        name = dtype_name(dtype)
        if name not in rates:
            raise ConfigError(f"peak_flops has no figure for {name}; it has: {', '.join(rates)}")
        return self.efficiency * rates[name]

    def kernel_seconds(self, flops: float, nbytes: float, dtype: object) -> float:
        """One kernel: the longest of its arithmetic, its memory traffic and its launch (a roofline with a floor)."""
        return max(self.launch_seconds, flops / self.flops_per_second(dtype), nbytes / self.memory_bandwidth)

    def ring(self, size: int, stride: int = 1) -> Ring:
        """Ranks ``0, stride, 2 stride, ...`` and every group like it, over the slowest link that any of them uses.

        Raises:
            ConfigError: when the cluster has fewer than ``size * stride`` devices.
        """
        span = size * stride
        if size < 1 or stride < 1 or span > self.devices:
            near = max(1, self.devices // max(stride, 1))
            raise ConfigError(
                f"size={size} ranks, {stride} apart, do not fit {self.devices} devices "
                f"({self.nodes} nodes of {self.devices_per_node}); nearest valid size: {near}"
            )
        # A group crosses nodes unless whole groups fill a node.
        inside = self.nodes == 1 or self.devices_per_node % span == 0
        return Ring(size, self.intra_node if inside else self.inter_node, self.collective_factors)

    def axis_ring(self, axis: str, layout: Layout) -> Ring:
        """The groups of one mesh axis of ``layout`` (the tensor axis is innermost).

        Raises:
            ConfigError: on an unknown axis or a layout that is larger than the cluster.
        """
        refuse_unknown("axis", [axis], AXES)
        sizes = layout.sizes
        place = AXES.index(axis)
        ring = self.ring(sizes[place], math.prod(sizes[place + 1 :]))
        return replace(ring, link=self.axis_links[axis]) if axis in self.axis_links else ring

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cluster:
        """From plain data, as YAML holds it.

        Raises:
            ConfigError: on unknown, missing or wrong settings.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"cluster={values!r}: expected a mapping")
        refuse_unknown("cluster", values, [f.name for f in fields(cls)])
        needed = ["devices_per_node", "nodes", "peak_flops", "memory_bandwidth", "intra_node", "inter_node"]
        missing = [name for name in needed if name not in values]
        if missing:
            raise ConfigError(f"cluster: missing {', '.join(missing)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; :meth:`from_dict` gives an equal cluster back."""
        result: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Link):
                value = _link_data(value)
            elif f.name == "axis_links":
                value = {axis: _link_data(link) for axis, link in value.items()}
            elif isinstance(value, Mapping):
                value = dict(value)
            result[f.name] = value
        return result

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Read a file that :meth:`to_yaml` or a person wrote.

        Raises:
            ConfigError: on unreadable YAML and as :meth:`from_dict`, with the file's name in front.
        """
        import yaml

        try:
            return cls.from_dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        except (ConfigError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_yaml(self, path: str | Path) -> None:
        """Write a file that :meth:`from_yaml` reads."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


def _link_data(link: Link) -> dict[str, float]:
    return {"latency": link.latency, "bandwidth": link.bandwidth}
