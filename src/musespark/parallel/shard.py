"""Which part of which checkpoint tensor a module wants, and where it puts it.

A module that owns weights lists one `WeightSlot` per tensor on disk. The loader matches the list
against the files in both directions, reads only the bytes each slot asks for, and hands them over;
it knows nothing about modules, and modules know nothing about files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What a tensor stored for a floating-point parameter may be stored as.
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor a module takes from a checkpoint."""

    name: str
    """Key in the checkpoint."""
    shape: tuple[int, ...]
    """Full shape on disk, before any cut."""
    store: Callable[[Tensor], None]
    """Puts the tensor (cut to `index`) where it belongs; called exactly once."""
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    """Dtypes accepted on disk."""
    index: tuple[slice, ...] = ()
    """This rank's part, one slice per leading dimension; empty: all of it."""


def copy_into(target: Tensor) -> Callable[[Tensor], None]:
    """A `store` that converts to the target's dtype and device and copies into it."""

    def store(tensor: Tensor) -> None:
        target.copy_(tensor)

    return store
