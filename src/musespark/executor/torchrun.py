"""Ranks that torchrun has started: each runs the same program, and finds its place in it."""

import socket

from musespark.config.environment import TorchrunPlace
from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError
from musespark.executor.store import reach_store
from musespark.executor.world import Place, World, join_world


def join_torchrun(parallelism: Parallelism, place: TorchrunPlace, device_type: str) -> World:
    """Meet the other processes of this run.

    Raises:
        ConfigError: a layout for another number of processes, or one that needs a front.
    """
    if parallelism.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size: under torchrun nobody shares requests out. Set it to 1 and start "
            "one torchrun per replica, or let musespark start the processes."
        )
    if parallelism.world_size != place.world_size:
        raise ConfigError(
            f"torchrun started {place.world_size} processes, but tensor_parallel_size "
            f"{parallelism.tensor_parallel_size} x pipeline_parallel_size "
            f"{parallelism.pipeline_parallel_size} is {parallelism.world_size}. Change the sizes, "
            "or --nproc-per-node."
        )
    store = reach_store(place.store_host, place.store_port, prefix=f"musespark-{place.run_name}")
    # What one machine's ranks reach each other by; several machines need the driver's address.
    host = "127.0.0.1" if place.ranks_here == place.world_size else _own_address(place)
    return join_world(
        parallelism,
        Place(
            rank=place.rank,
            device_index=place.local_rank,
            ranks_here=place.ranks_here,
            host=host,
        ),
        store,
        device_type,
    )


def _own_address(place: TorchrunPlace) -> str:
    """This machine's address on the way to the machine that hosts the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.store_host, place.store_port))  # sends nothing
        return str(probe.getsockname()[0])
