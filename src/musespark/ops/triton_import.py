"""Triton where it is installed; elsewhere stand-ins, so that kernels can be defined but not run.

Kernels stand beside their references, and those are needed on machines without Triton too. Every
kernel file takes `triton` and `tl` from here.
"""

from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:

    def _plain(function: Any = None, **_options: Any) -> Any:
        """A decorator that leaves the function as it is."""
        return _plain if function is None else function

    class _Constexpr:
        def __init__(self, value: Any) -> None:
            self.value = value

    triton = SimpleNamespace(jit=_plain, autotune=_plain, heuristics=_plain)
    tl = SimpleNamespace(constexpr=_Constexpr)
    HAS_TRITON = False
    IS_INTERPRETED = False
else:
    HAS_TRITON = True
    IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
    """Whether kernels run in Triton's interpreter, on the CPU: for tests."""


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def dot_in_float32(dtype: torch.dtype) -> bool:
    """Whether operands of `tl.dot` must be widened: the interpreter multiplies bfloat16's bits."""
    return dtype == torch.float32 or IS_INTERPRETED


def num_multiprocessors(device: torch.device) -> int:
    """How many programs run side by side; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
