"""Which part of which checkpoint tensor a module wants, and where it puts it.

A module that owns weights lists one `WeightSlot` per tensor on disk. The loader matches the list
against the files in both directions, reads only the bytes each slot asks for, and hands them over;
it knows nothing about modules, and modules know nothing about files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from musespark.parallel.mesh import MeshAxis


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's run of one dimension that is cut over ranks."""

    total: int
    """Size of the dimension before the cut."""
    start: int
    stop: int

    @classmethod
    def whole(cls, total: int) -> "Share":
        """All of it."""
        return cls(total, 0, total)

    @classmethod
    def of(cls, total: int, axis: MeshAxis, *, units: int | None = None) -> "Share":
        """One of `axis.size` equal shares.

        Args:
            total: size of the dimension.
            axis: whose ranks share it.
            units: how many pieces cannot be cut further (heads); None: every element can be. With
                more ranks than pieces, neighbouring ranks hold the same one.
        """
        pieces = total if units is None else units
        if pieces < axis.size:
            start = axis.rank * pieces // axis.size
            stop = start + 1
        else:
            start = axis.rank * pieces // axis.size
            stop = (axis.rank + 1) * pieces // axis.size
        size = total // pieces
        return cls(total, start * size, stop * size)

    @property
    def size(self) -> int:
        """Elements here."""
        return self.stop - self.start

    @property
    def index(self) -> slice:
        """The run as a slice of the whole dimension."""
        return slice(self.start, self.stop)


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
        with torch.no_grad():
            target.copy_(tensor)

    return store


HasTensor = Callable[[str], bool]
"""Whether the checkpoint holds a tensor of this name."""


def weight_slots(module: nn.Module, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
    """The slots of a module and all below it.

    A module with a method `weight_slots` of its own (one that fuses tensors, or that can be
    stored in more than one way) speaks for itself and its children. Every other parameter is
    stored under its own name and shape.
    """
    own = getattr(module, "weight_slots", None)
    if own is not None:
        yield from own(prefix, has)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield WeightSlot(f"{prefix}{name}", tuple(parameter.shape), copy_into(parameter))
    for name, child in module.named_children():
        yield from weight_slots(child, f"{prefix}{name}.", has)
