"""What a layout costs in seconds: descriptions of clusters and the times of their collectives."""

from lightning_megapar.planner.cluster import Cluster, Link, Ring

__all__ = ["Cluster", "Link", "Ring"]
