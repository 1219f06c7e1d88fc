"""Text data, its batch arithmetic, and a sampler that resumes on any layout.

Names are imported on first use, so that ``import lightning_megapar.data`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_megapar.data.batch import BatchPlan
    from lightning_megapar.data.files import CorpusOptions
    from lightning_megapar.data.module import TextDataModule
    from lightning_megapar.data.sampler import ResumableSampler
    from lightning_megapar.data.text import SEPARATOR, VOCAB_SIZE, Corpus, load_corpus

_HOMES = {
    "BatchPlan": "batch",
    "CorpusOptions": "files",
    "TextDataModule": "module",
    "ResumableSampler": "sampler",
    "SEPARATOR": "text",
    "VOCAB_SIZE": "text",
    "Corpus": "text",
    "load_corpus": "text",
}

__all__ = [
    "SEPARATOR",
    "VOCAB_SIZE",
    "BatchPlan",
    "Corpus",
    "CorpusOptions",
    "ResumableSampler",
    "TextDataModule",
    "load_corpus",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
