"""Input scales for NVFP4 experts, from text that runs through the BF16 model.

Needs the whole model in memory, unlike the quantizer. W4A16 ignores input scales; they matter
where activations are quantized too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from musespark.checkpoint.load import load_weights
from musespark.checkpoint.names import find_prefix
from musespark.checkpoint.shards import CheckpointReader
from musespark.config.model import DecoderConfig
from musespark.errors import CheckpointError, RequestError
from musespark.model.decoder import Decoder
from musespark.moe.calibration import InputRanges, watch_inputs
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.ops.linear import bfloat16_is_fast
from musespark.ops.nvfp4 import LARGEST

UNCALIBRATED = 1.0
"""What an input scale says that nobody measured."""


@dataclass(frozen=True, slots=True)
class InputScales:
    """The input scales of one layer's experts, as a checkpoint stores them."""

    gate_up: Tensor
    """[E, 2] float32: of the gate and the up projection, which are equal."""
    down: Tensor
    """[E] float32."""

    @classmethod
    def uncalibrated(cls, num_experts: int) -> "InputScales":
        """Scales that say they were not measured."""
        return cls(
            torch.full((num_experts, 2), UNCALIBRATED), torch.full((num_experts,), UNCALIBRATED)
        )


def calibrate(
    folder: Path | str,
    sequences: Iterable[Sequence[int]],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> dict[int, InputScales]:
    """Run sequences of token ids through a BF16 checkpoint and measure what its experts multiply.

    An expert that no token went to takes its layer's largest scale: the scale in use is the
    maximum over the experts anyway.

    Args:
        folder: the checkpoint.
        sequences: token ids; each runs alone, from its beginning.
        device: where to run.
        progress: told the tokens done so far.

    Returns:
        Scales by layer index, of every layer with experts.

    Raises:
        CheckpointError: the checkpoint is quantized, or its files do not fit.
        RequestError: no tokens, or ids outside the vocabulary.
    """
    decoder = _load(Path(folder), torch.device(device))
    ranges = {
        index: watch_inputs(experts)
        for index, layer in enumerate(decoder.layers)
        if isinstance(experts := getattr(layer.mlp, "experts", None), GroupedExperts)
    }
    done = 0
    for sequence in sequences:
        ids = _checked(sequence, decoder.config.vocab_size)
        if ids.numel():
            decoder.compute_logits(ids)
        done += ids.numel()
        if progress is not None:
            progress(done)
    if not done:
        raise RequestError("calibration: the text is empty, so nothing was measured.")
    return {index: _scales(of_layer) for index, of_layer in ranges.items()}


def _load(folder: Path, device: torch.device) -> Decoder:
    config = DecoderConfig.from_folder(folder)
    if config.quantization is not None:
        raise CheckpointError(
            f"{folder}: is quantized already. Calibrate on the BF16 checkpoint it was made from."
        )
    fast = device.type != "cpu" or bfloat16_is_fast()
    decoder = Decoder(config, dtype=torch.bfloat16 if fast else torch.float32, device=device)
    with CheckpointReader.open(folder) as reader:
        load_weights(decoder.weight_slots(find_prefix(reader), reader.__contains__), reader)
    decoder.finish_loading()
    decoder.pack()
    return decoder


def _checked(sequence: Sequence[int], vocab_size: int) -> Tensor:
    ids = torch.as_tensor(sequence, dtype=torch.int64)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise RequestError(
            f"calibration: token ids must be from 0 to {vocab_size - 1}, found "
            f"{int(ids.min())} to {int(ids.max())}."
        )
    return ids


def _scales(ranges: InputRanges) -> InputScales:
    def scales(largest: Tensor) -> Tensor:
        top = largest.max()
        filled = torch.where(largest > 0, largest, top) / LARGEST
        return filled if top > 0 else torch.full_like(largest, UNCALIBRATED)

    gate_up = scales(ranges.gate_up)
    return InputScales(torch.stack((gate_up, gate_up), dim=1), scales(ranges.down))
