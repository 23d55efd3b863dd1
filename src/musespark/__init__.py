"""musespark: an exact, fast and readable inference engine for the Muse Spark language models."""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from musespark.config.sampling import SamplingParams
    from musespark.llm.llm import LLM
    from musespark.llm.loading import load_decoder

__all__ = ["LLM", "SamplingParams", "__version__", "load_decoder"]

__version__ = version("musespark")

# Imported on first use: the chat parser or the scheduler alone must not cost an import of torch.
_HOMES = {
    "LLM": "musespark.llm.llm",
    "SamplingParams": "musespark.config.sampling",
    "load_decoder": "musespark.llm.loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
