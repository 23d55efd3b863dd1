"""RMS norms by the three ways in which the checkpoint's weight enters.

The weight is kept as loaded; the float32 gain that multiplies is formed once, after loading.
"""

import torch
from torch import Tensor, nn

from musespark.ops.kernel_set import choose_kernels
from musespark.ops.precision import wide_dtype


class RMSNorm(nn.Module):
    """Plain: rms(x) * w. The decoder's final norm."""

    gain: Tensor
    _scale_input = False

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = choose_kernels(device, dtype)
        self.weight = nn.Parameter(
            torch.empty(width, dtype=dtype, device=device), requires_grad=False
        )
        gain = torch.empty(width, dtype=wide_dtype(dtype), device=device)
        self.register_buffer("gain", gain, persistent=False)

    def finish_loading(self) -> None:
        """Form the gain from the loaded weight."""
        self.gain.copy_(self.weight)

    def permute(self, order: Tensor) -> None:
        """Put the gain in this order, for inputs whose columns are."""
        self.gain.copy_(self.gain[order])

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[..., width] -> [..., width] in `out_dtype` (x's own if None)."""
        return self.kernels.rms_norm(
            x, self.gain, self.eps, scale_input=self._scale_input, out_dtype=out_dtype
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class CentredRMSNorm(RMSNorm):
    """Centred: rms(x) * (1 + w). Every norm before a sub-layer."""

    def finish_loading(self) -> None:
        self.gain.copy_(self.weight).add_(1)


class WeightFirstRMSNorm(CentredRMSNorm):
    """Weight first: rms(x * (1 + w)). The norms after the experts and after the FFN."""

    _scale_input = True
