"""Where ranks leave notes for each other while they meet: torch.distributed's store."""

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist


class Store(Protocol):
    """Notes by name."""

    def set(self, key: str, value: str) -> None:
        """Leave a note."""
        ...

    def get(self, key: str) -> bytes:
        """A note, once it is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Until all these notes are there.

        Raises:
            torch.distributed.DistError: they were not there in time.
        """
        ...


# PyTorch does not say that it exports these two, though its documentation does.
_stores: Any = dist


def host_store(host: str, world_size: int) -> tuple[Store, int]:
    """A store in this process, on a free port, and the port."""
    store = _stores.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
    return store, store.port


def reach_store(host: str, port: int, *, prefix: str = "") -> Store:
    """The store of another process; with `prefix`, the part of it with such names."""
    store = _stores.TCPStore(host, port, is_master=False)
    return _stores.PrefixStore(prefix, store) if prefix else store
