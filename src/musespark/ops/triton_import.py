"""Triton where it is installed; elsewhere stand-ins, so that kernels can be defined but not run.

Kernels stand beside their references, and those are needed on machines without Triton too. Every
kernel file takes `triton` and `tl` from here.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

__all__ = [
    "HAS_TRITON",
    "IS_INTERPRETED",
    "dot_in_float32",
    "is_hopper",
    "launch_early",
    "next_power_of_2",
    "num_multiprocessors",
    "round_to",
    "tl",
    "triton",
    "wait_for_inputs",
]

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


_INTERPRETED = tl.constexpr(IS_INTERPRETED)
# Of a batch whose kernels are launched early.
_EARLY_TOKENS = 256


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Float32 `x` in `dtype`, rounded to nearest even; the interpreter would cut bits off."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def wait_for_inputs():
    """In a kernel that is launched early: until everything launched before it has finished.

    Nothing that another kernel writes may be read, and nothing may be written, before. The next
    kernel may start, too, and wait here in its turn: so a whole chain of small kernels is in place
    before its first inputs are there.
    """
    if not _INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_early(device: torch.device, num_tokens: int) -> dict[str, bool]:
    """Arguments of a launch that lets a kernel start while the one before it still runs.

    Its programs are then in place, and weights on their way, when their inputs are ready (NVIDIA's
    programmatic dependent launch, from Hopper on). The kernel must call `wait_for_inputs`. With
    many tokens, programs that wait only take room from those that work.
    """
    return {"launch_pdl": True} if num_tokens <= _EARLY_TOKENS and _can_launch_early(device) else {}


@cache
def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0, which some kernels are written for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


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
