"""From a model's name to a decoder in memory."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from musespark.checkpoint.load import Progress, load_weights
from musespark.checkpoint.names import find_prefix, is_skipped_of_draft
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.draft import DraftConfig
from musespark.config.model import DecoderConfig
from musespark.config.parallel import MoEBackend, Parallelism
from musespark.errors import ConfigError
from musespark.model.decoder import Decoder
from musespark.model.draft import DraftDecoder
from musespark.moe.deployment import validate_deployment
from musespark.ops.linear import bfloat16_is_fast

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def load_decoder(
    model: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    moe_backend: str = "auto",
    progress: Progress | None = None,
) -> Decoder:
    """Load a checkpoint's decoder, ready to run, with its weights still readable as parameters.

    Args:
        model: a folder, a packaged model's name, or a Hugging Face repository id.
        device: where to put the weights.
        dtype: compute dtype: "bfloat16", "float32" or "float64" (or torch's); None: bfloat16,
            or float32 on a CPU without bfloat16 products.
        revision: branch, tag or commit of a Hugging Face repository.
        moe_backend: what computes the experts: "auto", "reference" or "w4a4".
        progress: told the bytes loaded so far and in all.

    Raises:
        ConfigError: the config or an argument is unsupported; no weight has been read then.
        CheckpointError: files are missing, damaged, or do not fit the config.
    """
    parallelism = Parallelism(moe_backend=cast("MoEBackend", moe_backend))  # checked there
    folder = resolve_checkpoint(str(model), revision)
    device = _checked_device(device)
    config = DecoderConfig.from_folder(folder)
    validate_deployment(config, parallelism)
    with CheckpointReader.open(folder) as reader:
        decoder = Decoder(
            config,
            dtype=_checked_dtype(dtype, device),
            device=device,
            moe_backend=parallelism.moe_backend,
        )
        slots = decoder.weight_slots(find_prefix(reader), reader.__contains__)
        load_weights(slots, reader, progress=progress)
    decoder.finish_loading()
    return decoder


def load_draft(
    draft: str | Path,
    target: DecoderConfig,
    embedding: Tensor,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    progress: Progress | None = None,
) -> DraftDecoder:
    """Load a DSpark draft for `target`, ready to run, on the device of `embedding`.

    Args:
        draft: a folder, a packaged draft's name, or a Hugging Face repository id.
        target: the model it is to propose tokens for.
        embedding: [V, D] the target's whole embedding table; kept, not copied.
        dtype: compute dtype, the target's own.
        revision: branch, tag or commit of a Hugging Face repository.
        progress: told the bytes loaded so far and in all.

    Raises:
        ConfigError: the config is unsupported, or of a draft for another target.
        CheckpointError: files are missing, damaged, or do not fit the config or the target.
    """
    folder = resolve_checkpoint(str(draft), revision)
    config = DraftConfig.from_folder(folder)
    model = DraftDecoder(config, target, embedding, dtype=dtype, device=embedding.device)
    with CheckpointReader.open(folder) as reader:
        slots = model.weight_slots(reader.__contains__)
        load_weights(slots, reader, progress=progress, elsewhere=is_skipped_of_draft)
    model.finish_loading()
    return model


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        checked = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device: must be 'cpu' or 'cuda', found {device!r}.") from None
    if checked.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: must be 'cpu' or 'cuda', found {device!r}.")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: 'cuda' was asked for, but PyTorch sees no CUDA device. Use device 'cpu', or "
            "install a CUDA build of PyTorch (see docs/getting-started.md)."
        )
    return checked


def _checked_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        fast = device.type != "cpu" or bfloat16_is_fast()
        return torch.bfloat16 if fast else torch.float32
    checked = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if checked is None or checked not in _DTYPES.values():
        raise ConfigError(f"dtype: must be one of {', '.join(_DTYPES)}, found {dtype!r}.")
    return checked
