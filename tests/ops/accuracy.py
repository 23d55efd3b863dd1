"""How close an operation must come to its formula in float64."""

import torch
from torch import Tensor

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

RELATIVE_ERROR = {F32: 1e-6, F64: 1e-14}

# Float32 arithmetic before one rounding to bfloat16 lands on the other side of a rounding boundary
# once in a few thousand values; a second rounding does so once in a few.
_MAX_SHARE_OFF = 0.01


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of its own for each test."""
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values, drawn in float32."""
    return (torch.randn(shape, generator=seeded(seed)) * scale).to(dtype)


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """How many bfloat16 values lie between two bfloat16 tensors, elementwise."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits >= 0, bits, -(bits & 0x7FFF))

    return (ordered(actual) - ordered(expected)).abs()


def assert_rounded_once(actual: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> None:
    """`actual` is the float64 `exact`, computed in float32 (float64) and rounded once at the end.

    Args:
        actual: bfloat16: at most one step from the correctly rounded value, and nearly all equal
            to it. float32, float64: within the relative error of its arithmetic.
        exact: the formula in float64 on the same inputs.
        magnitude: size of the terms that `exact` sums, where they may cancel; default |exact|.
    """
    assert actual.shape == exact.shape
    assert exact.dtype == F64
    if actual.numel() == 0:
        return
    error = (actual.to(F64) - exact).abs()
    size = exact.abs() if magnitude is None else magnitude.to(F64)
    if actual.dtype != BF16:
        bound = RELATIVE_ERROR[actual.dtype] * size
        assert bool((error <= bound).all()), f"relative error {(error / size).max():.2e}"
        return
    distance = ulp_distance(actual, exact.to(BF16))
    # What cancels keeps the absolute error of its terms.
    noise = error <= RELATIVE_ERROR[F32] * size if magnitude is not None else distance == 0
    assert bool(((distance <= 1) | noise).all()), f"{int(distance.max())} steps of bfloat16 away"
    num_off = int(((distance > 0) & ~noise).sum())
    assert num_off <= max(1, _MAX_SHARE_OFF * actual.numel()), f"{num_off} of {actual.numel()} off"


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """|actual - exact| <= bound everywhere."""
    assert actual.shape == exact.shape
    error = (actual.to(F64) - exact.to(F64)).abs()
    limit = torch.as_tensor(bound, dtype=F64).expand_as(error)
    assert bool((error <= limit).all()), f"{(error / limit).max():.3g} times the bound"
