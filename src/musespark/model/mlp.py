"""The dense feed-forward network of layers without experts."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.modules.linear import FusedLinear, Linear
from musespark.ops.kernel_set import choose_kernels
from musespark.parallel.shard import HasTensor, WeightSlot, weight_slots


class DenseMLP(nn.Module):
    """down_proj( silu(gate_proj(x)) * up_proj(x) )."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_up_proj = FusedLinear(
            hidden, {"gate_proj": width, "up_proj": width}, dtype=dtype, device=device
        )
        self._silu_mul = choose_kernels(device, dtype).silu_mul
        self.down_proj = Linear(width, hidden, dtype=dtype, device=device)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """Gate and up stand apart in a checkpoint."""
        yield from self.gate_up_proj.part_slots(prefix)
        yield from weight_slots(self.down_proj, f"{prefix}down_proj.", has)

    def forward(self, hidden_states: Tensor, _padding: Tensor | None = None) -> Tensor:
        """[T, D] -> [T, D]; rows that are padding are computed like others."""
        return self.down_proj(self._silu_mul(self.gate_up_proj(hidden_states)))
