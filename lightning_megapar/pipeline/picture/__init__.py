"""Pictures of pipeline timelines, simulated and measured."""

from lightning_megapar.pipeline.picture.drawing import Drawing
from lightning_megapar.pipeline.picture.timelines import Panel, beside_simulated, draw, measured_panel, simulated_panel

__all__ = ["Drawing", "Panel", "beside_simulated", "draw", "measured_panel", "simulated_panel"]
