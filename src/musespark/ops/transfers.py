"""Numbers between host and device, without either waiting for the other."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, once what was launched before has run."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # Only from pinned memory does the copy wait in the device's queue instead of here.
    return tensor.pin_memory().to(device, non_blocking=True)


class Readback:
    """Tensors on their way to the host, which may do something else meanwhile."""

    def __init__(self, *tensors: Tensor) -> None:
        """Copies them as they are once what was launched before has run."""
        self._here, self._arrived = tensors, None
        if tensors[0].is_cuda:
            self._here = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            )
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))

    def lists(self) -> list[Any]:
        """The numbers of each tensor; waits until they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.tolist() for tensor in self._here]
