"""What is read from environment variables: only here."""

import os
from dataclasses import dataclass
from pathlib import Path


def cache_folder() -> Path:
    """Where files go that can be made again: $XDG_CACHE_HOME/musespark, or ~/.cache/musespark."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "musespark"


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """What torchrun tells each process that it starts."""

    rank: int
    world_size: int
    local_rank: int
    ranks_here: int
    store_host: str
    """Where the ranks find each other."""
    store_port: int
    run_name: str
    """Differs between runs, and between attempts of one run."""


def torchrun_place() -> TorchrunPlace | None:
    """This process's place under torchrun; None: it was started by something else."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    return TorchrunPlace(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        ranks_here=int(os.environ["LOCAL_WORLD_SIZE"]),
        store_host=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
        run_name=f"{run}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )
