"""The dtype that norms, gates, routing and the residual stream are computed in."""

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 when the model itself runs in float64 (the tests' oracle)."""
    return torch.float64 if dtype == torch.float64 else torch.float32
