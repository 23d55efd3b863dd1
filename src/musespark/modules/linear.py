"""Linear layers without a bias, whose weights are packed once at load."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from musespark.ops.linear import (
    can_pack,
    linear,
    pack_linear,
    pack_wide_linear,
    wide_linear,
)
from musespark.parallel.shard import WeightSlot, copy_into


class Linear(nn.Module):
    """y = x @ weight.T, with `weight` [out_features, in_features]."""

    weight: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        wide_output: bool = False,
    ) -> None:
        """`wide_output`: hand out float32 (float64 in float64) whatever the compute dtype."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self._wide_output = wide_output
        self._matmul = (wide_linear if wide_output else linear)(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self._matmul(x)

    def pack(self) -> None:
        """Move the weight to the machine's fastest layout; `weight` itself is given up then."""
        if self.weight is not None and can_pack(self.weight):
            pack = pack_wide_linear if self._wide_output else pack_linear
            self._matmul = pack(self.weight)
            self.weight = None

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


class FusedLinear(Linear):
    """Several projections of one input as one product; the checkpoint holds them apart.

    The parts' rows lie one below the other in `weight`, in the order of `parts`.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts` maps each projection's name in the checkpoint to its number of rows."""
        super().__init__(in_features, sum(parts.values()), dtype=dtype, device=device)
        self.parts = parts

    def part_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of the parts, named `{prefix}{part}.weight`."""
        assert self.weight is not None
        rows = self.weight.split(list(self.parts.values()))
        for (part, size), target in zip(self.parts.items(), rows, strict=True):
            yield WeightSlot(f"{prefix}{part}.weight", (size, self.in_features), copy_into(target))
