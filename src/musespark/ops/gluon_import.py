"""Gluon, Triton's lower level, under one version's names; stand-ins where it is missing.

Kernels in Gluon stand beside those in Triton, and must be defined where neither can run.
"""

from types import SimpleNamespace
from typing import Any

from musespark.ops.triton_import import tl, triton

__all__ = [
    "HAS_GLUON",
    "TensorDescriptor",
    "async_copy",
    "barrier",
    "constexpr_function",
    "copy_tensor",
    "copy_words",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def _first(owner: Any, *names: str) -> Any:
    """What the owner has under the first of these names that it knows."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise ImportError(f"Gluon has none of {', '.join(names)}.")


try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    constexpr_function = _first(gluon, "constexpr_function")
    copy_words = _first(async_copy, "async_load", "async_copy_global_to_shared")
    """Copy to shared memory, 16 bytes and less at a time, from a pointer each."""
    copy_tensor = _first(tma, "async_load", "async_copy_global_to_shared")
    """Copy a box of a tensor to shared memory by its descriptor."""
    barrier = _first(gl, "barrier", "thread_barrier")
    """Wait for the partition's other warps."""
    reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
    """Shared memory as another shape."""
    HAS_GLUON = True
except ImportError:
    missing: Any = None
    gluon, gl = SimpleNamespace(jit=triton.jit), SimpleNamespace(constexpr=tl.constexpr)
    constexpr_function = triton.jit
    TensorDescriptor = fence_async_shared = warpgroup_mma = warpgroup_mma_wait = missing
    async_copy = mbarrier = barrier = copy_words = copy_tensor = reinterpret = missing
    HAS_GLUON = False
