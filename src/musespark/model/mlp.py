"""The dense feed-forward network of layers without experts."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.modules.linear import FusedLinear, RowParallelLinear
from musespark.ops.kernel_set import choose_kernels
from musespark.parallel.mesh import ALONE, MeshAxis
from musespark.parallel.placement import HERE, Placement
from musespark.parallel.rank_sums import PartialSums
from musespark.parallel.shard import HasTensor, Share, WeightSlot, weight_slots


class DenseMLP(nn.Module):
    """down_proj( silu(gate_proj(x)) * up_proj(x) ); ranks share the intermediate features."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        axis: MeshAxis = ALONE,
    ) -> None:
        super().__init__()
        hidden, width = config.hidden_size, Share.of(config.intermediate_size, axis)
        self.gate_up_proj = FusedLinear(
            hidden, {"gate_proj": width, "up_proj": width}, dtype=dtype, device=device
        )
        self._silu_mul = choose_kernels(device, dtype).silu_mul
        self.down_proj = RowParallelLinear(width, hidden, dtype=dtype, device=device)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """Gate and up stand apart in a checkpoint."""
        yield from self.gate_up_proj.part_slots(prefix)
        yield from weight_slots(self.down_proj, f"{prefix}down_proj.", has)

    def forward(self, hidden_states: Tensor, place: Placement = HERE) -> Tensor | PartialSums:
        """The rows at `place` -> as many, [., D]; padding is computed like the rest."""
        everybody = place.gather(hidden_states)  # [T, D]
        partial = self.down_proj(self._silu_mul(self.gate_up_proj(everybody)))
        return place.reduce_in_boundary(partial)
