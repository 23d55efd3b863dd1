"""Where a rank's share of the experts lies in a checkpoint.

A checkpoint holds a layer's experts stacked, `gate_up_proj` [E, 2I, ...] (the gate rows first) and
`down_proj` [E, H, I ...], or one by one, `{e}.gate_proj.weight` [I, ...] and so on. Both kinds are
cut alike: whole experts, and of each one's I features a run.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from musespark.moe.experts.part import ExpertPart
from musespark.parallel.shard import FLOAT_DTYPES, HasTensor, WeightSlot, copy_into

_ALL = slice(None)


def stored_one_by_one(prefix: str, has: HasTensor) -> bool:
    """Whether the checkpoint holds the experts under `prefix` one by one."""
    return has(f"{prefix}0.gate_proj.weight")


def gate_up_slots(
    key: str, target: Tensor, part: ExpertPart, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> Iterator[WeightSlot]:
    """Slots of the stacked [E, 2I, N] for `target` [E here, 2 * I here, N]."""
    shape = (part.num_experts, 2 * part.intermediate, target.shape[2])
    if not part.gives_partial_sums:
        yield WeightSlot(key, shape, copy_into(target), dtypes, (part.experts,))
        return
    for first, half in zip((0, part.intermediate), target.chunk(2, dim=1), strict=True):
        rows = slice(first + part.inner.start, first + part.inner.stop)
        yield WeightSlot(key, shape, copy_into(half), dtypes, (part.experts, rows))


def down_slot(
    key: str, target: Tensor, part: ExpertPart, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
) -> WeightSlot:
    """The slot of the stacked [E, H, I / n] for `target` [E here, H, I here / n]."""
    columns, stored = _columns(target, part)
    shape = (part.num_experts, target.shape[1], stored)
    return WeightSlot(key, shape, copy_into(target), dtypes, (part.experts, _ALL, columns))


def single_expert_slots(
    prefix: str,
    ending: str,
    gate_up: Tensor,
    down: Tensor,
    part: ExpertPart,
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
) -> Iterator[WeightSlot]:
    """Slots of `{prefix}{e}.{gate,up,down}_proj.{ending}`; targets as in the stacked form."""
    columns, stored = _columns(down, part)
    for here, expert in enumerate(range(part.experts.start, part.experts.stop)):
        key = f"{prefix}{expert}.{{}}_proj.{ending}"
        for name, target in zip(("gate", "up"), gate_up[here].chunk(2), strict=True):
            shape = (part.intermediate, target.shape[1])
            yield WeightSlot(key.format(name), shape, copy_into(target), dtypes, (part.inner,))
        yield WeightSlot(
            key.format("down"),
            (down.shape[1], stored),
            copy_into(down[here]),
            dtypes,
            (_ALL, columns),
        )


def _columns(down: Tensor, part: ExpertPart) -> tuple[slice, int]:
    """The columns of a down projection that this share takes, and how many are stored.

    Packed weights and block scales have fewer columns than I: n features share one.
    """
    shared_by = part.inner_size // down.shape[2]
    columns = slice(part.inner.start // shared_by, part.inner.stop // shared_by)
    return columns, part.intermediate // shared_by
