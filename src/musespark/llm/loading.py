"""From a model's name to a decoder in memory."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from musespark.checkpoint.load import Progress, load_weights
from musespark.checkpoint.names import find_prefix, is_skipped_of_draft
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.draft import DraftConfig
from musespark.config.model import DecoderConfig
from musespark.config.parallel import ONE, Parallelism
from musespark.errors import ConfigError
from musespark.model.decoder import Decoder
from musespark.model.draft import DraftDecoder
from musespark.modules.rank_sums import connect_rank_sums
from musespark.moe.deployment import validate_deployment
from musespark.ops.linear import bfloat16_is_fast
from musespark.parallel.layout import Layout
from musespark.parallel.mesh import SINGLE_PROCESS, Mesh

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
    parallelism: Parallelism = ONE,
    mesh: Mesh = SINGLE_PROCESS,
    progress: Progress | None = None,
) -> Decoder:
    """Load a checkpoint's decoder, ready to run, with its weights still readable as parameters.

    Args:
        model: a folder, a packaged model's name, or a Hugging Face repository id.
        device: where to put the weights.
        dtype: compute dtype: "bfloat16", "float32" or "float64" (or torch's); None: bfloat16,
            or float32 on a CPU without bfloat16 products.
        revision: branch, tag or commit of a Hugging Face repository.
        parallelism: how the model is spread over processes, and what computes its experts.
        mesh: this process's place among them (`build_mesh`); each loads only its own part.
        progress: told the bytes loaded so far and in all.

    Raises:
        ConfigError: the config or an argument is unsupported; no weight has been read then.
        CheckpointError: files are missing, damaged, or do not fit the config.
    """
    folder = resolve_checkpoint(str(model), revision)
    device = _checked_device(device)
    config = DecoderConfig.from_folder(folder)
    validate_deployment(config, parallelism)
    dtype = _checked_dtype(dtype, device)
    layout = _checked_layout(parallelism, mesh)
    widest = max(config.hidden_size, config.num_experts_per_tok * config.moe_hidden_size)
    wanted = parallelism.fuse_all_reduce
    sums = connect_rank_sums(mesh.tensor, widest, dtype=dtype, device=device, wanted=wanted)
    layout = replace(layout, sums=sums)
    with CheckpointReader.open(folder) as reader:
        decoder = Decoder(
            config,
            dtype=dtype,
            device=device,
            layout=layout,
        )
        prefix = find_prefix(reader)
        slots = decoder.weight_slots(prefix, reader.__contains__)
        elsewhere = _names_of_all_ranks(config, prefix, reader)
        load_weights(slots, reader, progress=progress, elsewhere=elsewhere.__contains__)
    decoder.finish_loading()
    return decoder


def load_embedding(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The whole embedding table [V, D] of a model, for a rank that does not hold it."""
    with CheckpointReader.open(folder) as reader:
        table = reader.read(f"{find_prefix(reader)}embed_tokens.weight")
        return table.to(device, dtype, copy=True)


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


def whole_embedding(decoder: Decoder, model: str | Path, revision: str | None = None) -> Tensor:
    """The target's embedding table [V, D], which a draft needs, on the decoder's device.

    It is the decoder's own where that has all of it, and otherwise read from `model` once more.

    Args:
        decoder: one rank's part of the target.
        model, revision: what `decoder` was loaded from.
    """
    own = decoder.embed_tokens
    if own is not None and len(own.weight) == decoder.config.vocab_size:
        return own.weight
    with CheckpointReader.open(resolve_checkpoint(str(model), revision)) as reader:
        table = reader.read(f"{find_prefix(reader)}embed_tokens.weight", ())
        return table.to(decoder.device, decoder.dtype, copy=True)


def _names_of_all_ranks(
    config: DecoderConfig, prefix: str, reader: CheckpointReader
) -> frozenset[str]:
    """What one process alone would load: what is not this rank's part of it is another's."""
    whole = Decoder(config, dtype=torch.bfloat16, device="meta")
    return frozenset(slot.name for slot in whole.weight_slots(prefix, reader.__contains__))


def _checked_layout(parallelism: Parallelism, mesh: Mesh) -> Layout:
    needs = parallelism.world_size
    if needs > 1 and mesh == SINGLE_PROCESS:
        raise ConfigError(
            f"parallelism: the sizes make {needs} processes, and this one has no place among them. "
            "Start them with musespark serve, musespark generate or torchrun, and give each its "
            "mesh: build_mesh(parallelism, rank)."
        )
    return Layout(parallelism, mesh)


def default_device() -> str:
    """CUDA where there is a device, the CPU elsewhere."""
    return "cuda" if torch.cuda.is_available() else "cpu"


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
