"""Matrix products with weights packed once, at load.

On a CPU, bfloat16 products through plain weights repack the weight on every call, which costs
more than the product for few tokens. oneDNN's own layout, made once, removes that; the result is
the same. Elsewhere weights stay as they are.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

MatMul = Callable[[Tensor], Tensor]


def bfloat16_is_fast() -> bool:
    """Whether this CPU multiplies bfloat16 matrices with oneDNN."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def can_pack(weight: Tensor) -> bool:
    """Whether `pack_linear` has a faster layout for this weight on this machine."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and bfloat16_is_fast()


def linear(weight: Tensor) -> MatMul:
    """x [.., in] -> x @ weight.T [.., out], reading `weight` [out, in] as it is at each call."""
    return lambda x: F.linear(x, weight)


def pack_linear(weight: Tensor) -> MatMul:
    """Like `linear`, over a packed copy of `weight`, which may then be freed."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
