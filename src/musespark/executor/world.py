"""The ranks of a model that have found each other, as one of them sees them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from musespark.config.parallel import Parallelism
from musespark.executor.store import Store
from musespark.parallel.mesh import SINGLE_PROCESS, Mesh, build_mesh

# A rank that has died is noticed by whoever started it, at once. These only bound what else could
# hang: a step, and the wait for the rank that reads its weights from the slowest disk.
_STEP_TIMEOUT = timedelta(hours=1)
_LOADING_TIMEOUT = timedelta(days=1)
_LEAVING_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is, and where it runs."""

    rank: int = 0
    device_index: int = 0
    """Its GPU among those that it sees."""
    ranks_here: int = 1
    """Ranks on its machine, which share cores and memory."""
    host: str = "127.0.0.1"
    """Its machine's address for the other ranks."""


class World:
    """This process's place among all, and the little that is agreed outside of the model."""

    def __init__(
        self,
        parallelism: Parallelism,
        place: Place,
        store: Store | None = None,
        control: dist.ProcessGroup | None = None,
        drivers: dist.ProcessGroup | None = None,
        mesh: Mesh = SINGLE_PROCESS,
    ) -> None:
        """Without `store`, the one process there is. See `join_world`.

        Args:
            parallelism: the layout.
            place: this process's.
            store: where the ranks leave each other notes.
            control: all ranks, to agree on numbers on the host.
            drivers: the replicas' drivers, on the drivers themselves.
            mesh: who works together.
        """
        self.parallelism, self.place, self.mesh = parallelism, place, mesh
        self.store, self._control, self._drivers = store, control, drivers

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of every rank's numbers, one by one; all ranks call it."""
        if self._control is None:
            return list(numbers)
        agreed = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._control)
        return agreed.tolist()

    def any_driver(self, *flags: bool) -> tuple[bool, ...]:
        """Whether any replica's driver says so, flag by flag; all drivers call it."""
        if self._drivers is None:
            return flags
        agreed = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._drivers)
        return tuple(bool(flag) for flag in agreed.tolist())

    def leave(self) -> None:
        """Take leave of the others, who do the same.

        NCCL looks at the store until its groups are gone; rank 0, which may host it, leaves last.
        """
        if self.store is None:
            return
        dist.destroy_process_group()
        if self.place.rank > 0:
            self.store.set(_left_note(self.place.rank), "")
            return
        others = range(1, self.parallelism.world_size)
        with contextlib.suppress(dist.DistError):  # one is late or lost: whoever started it knows
            self.store.wait([_left_note(rank) for rank in others], _LEAVING_TIMEOUT)


def _left_note(rank: int) -> str:
    return f"musespark-left-{rank}"


def join_world(
    parallelism: Parallelism, place: Place, store: Store | None, device_type: str
) -> World:
    """Meet the other ranks; every rank calls this.

    Args:
        parallelism: the layout.
        place: this process's.
        store: where the ranks find each other; None for the one rank there is.
        device_type: "cuda" or "cpu".
    """
    world_size = parallelism.world_size
    if device_type == "cuda":
        torch.cuda.set_device(place.device_index)
    if world_size == 1:
        return World(parallelism, place)
    assert store is not None
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=store,  # type: ignore[arg-type]
        rank=place.rank,
        world_size=world_size,
        timeout=_STEP_TIMEOUT,
    )
    mesh = build_mesh(parallelism, place.rank, timeout=_STEP_TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=_LOADING_TIMEOUT)
    replicas = range(parallelism.data_parallel_size)
    drivers = dist.new_group(
        [parallelism.driver_rank(replica) for replica in replicas],
        backend="gloo",
        timeout=_LOADING_TIMEOUT,
    )
    return World(parallelism, place, store, control, drivers if mesh.is_driver else None, mesh)
