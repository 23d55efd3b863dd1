"""One layer's experts, from BF16 on disk to NVFP4 in a writer, expert by expert."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from musespark.checkpoint.calibrate import InputScales
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.write import CheckpointWriter
from musespark.config.model import DecoderConfig
from musespark.errors import CheckpointError
from musespark.ops.nvfp4 import GROUP_SIZE, ScaleChoice, dequantize, global_scale, quantize

# Weights that each thread quantizes at once: what a core's cache holds of them in float32.
_PIECE_PER_THREAD = 2**16


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far a layer's experts moved: root of the sum of squared errors over that of squares."""

    layer: int
    gate_up: float
    down: float


class PlainExperts:
    """The BF16 experts of one layer, one at a time."""

    def __init__(self, reader: CheckpointReader, prefix: str, config: DecoderConfig) -> None:
        self.prefix, self.num_experts = prefix, config.num_local_experts
        self.width, self.inner = config.moe_hidden_size, config.moe_intermediate_size
        self._reader = reader
        self._one_by_one = f"{prefix}0.gate_proj.weight" in reader

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Gate [I, H], up [I, H] and down [H, I] of each expert."""
        for expert in range(self.num_experts):
            if self._one_by_one:
                keys = [f"{expert}.{name}_proj.weight" for name in ("gate", "up", "down")]
                gate, up, down = (self._read(key) for key in keys)
            else:
                index = (slice(expert, expert + 1),)
                gate, up = self._read("gate_up_proj", index)[0].chunk(2)
                down = self._read("down_proj", index)[0]
            self._check(gate, "gate_proj", (self.inner, self.width))
            self._check(up, "up_proj", (self.inner, self.width))
            self._check(down, "down_proj", (self.width, self.inner))
            yield gate, up, down

    def _read(self, key: str, index: tuple[slice, ...] = ()) -> Tensor:
        return self._reader.read(f"{self.prefix}{key}", index)

    def _check(self, weight: Tensor, name: str, shape: tuple[int, ...]) -> None:
        if tuple(weight.shape) != shape or not weight.dtype.is_floating_point:
            raise CheckpointError(
                f"{self._reader.folder}: {self.prefix}: an expert's {name} is {weight.dtype} "
                f"{list(weight.shape)}, but the config makes it a float {list(shape)}. Use the "
                "config.json that was saved with these weights."
            )


def quantize_layer(
    layer: int,
    experts: PlainExperts,
    writer: CheckpointWriter,
    input_scales: InputScales | None,
    choice: ScaleChoice,
    done: Callable[[int], None],
) -> LayerError:
    """Quantize one layer's experts and hand them to the writer.

    Args:
        layer: its index, for the report.
        experts: where they come from.
        writer: where they go.
        input_scales: as measured; None: written as uncalibrated.
        choice: how block scales are found.
        done: told the bytes read, expert by expert.
    """
    count, width, inner = experts.num_experts, experts.width, experts.inner
    gate_up = _Packed(count, 2 * inner, width, halves=2)
    down = _Packed(count, width, inner, halves=1)
    for expert, (gate, up, down_weight) in enumerate(experts):
        where = f"{experts.prefix}{expert}"
        gate_up.put(expert, 0, gate, f"{where}.gate_proj", choice)
        gate_up.put(expert, 1, up, f"{where}.up_proj", choice)
        down.put(expert, 0, down_weight, f"{where}.down_proj", choice)
        done(sum(weight.numel() * weight.element_size() for weight in (gate, up, down_weight)))
    scales = input_scales or InputScales.uncalibrated(count)
    gate_up.write(writer, f"{experts.prefix}gate_up_proj", scales.gate_up)
    down.write(writer, f"{experts.prefix}down_proj", scales.down)
    return LayerError(layer, gate_up.error(), down.error())


class _Packed:
    """One projection of all experts of a layer, as it fills up."""

    def __init__(self, count: int, rows: int, columns: int, halves: int) -> None:
        self._codes = torch.empty(count, rows, columns // 2, dtype=torch.uint8)
        self._scales = torch.empty(count, rows, columns // GROUP_SIZE, dtype=torch.float8_e4m3fn)
        self._global_scales = torch.empty(count, halves)
        self._squared_error, self._squares = 0.0, 0.0

    def put(self, expert: int, half: int, weight: Tensor, where: str, choice: ScaleChoice) -> None:
        """Quantize [rows, columns] of one expert; `where` is its name for errors."""
        scale = global_scale(weight).reshape(())
        if not torch.isfinite(scale):
            raise CheckpointError(f"{where}: holds weights that are not finite.")
        self._global_scales[expert, half] = scale
        first_row = half * weight.shape[0]
        step = max(1, _PIECE_PER_THREAD * torch.get_num_threads() // weight.shape[1])
        for start in range(0, weight.shape[0], step):
            piece = weight[start : start + step].to(torch.float32)
            codes, scales = quantize(piece, scale, choice)
            rows = slice(first_row + start, first_row + start + piece.shape[0])
            self._codes[expert, rows] = codes
            self._scales[expert, rows] = scales
            error = dequantize(codes, scales).mul_(scale).sub_(piece)
            self._squared_error += float(error.square_().sum())
            self._squares += float(piece.square_().sum())

    def error(self) -> float:
        """The relative error over all experts."""
        return float((self._squared_error / self._squares) ** 0.5) if self._squares else 0.0

    def write(self, writer: CheckpointWriter, key: str, input_scales: Tensor) -> None:
        """Hand all of it to the writer."""
        halves = self._global_scales.shape[1]
        global_scales = self._global_scales if halves > 1 else self._global_scales.squeeze(1)
        writer.add(key, self._codes)
        writer.add(f"{key}_weight_scale", self._scales)
        writer.add(f"{key}_weight_scale_2", global_scales)
        writer.add(f"{key}_input_scale", input_scales)
