"""How often each expert is chosen: counted on the device, read now and then."""

from torch import Tensor, nn

from musespark.moe.router import Router


class ExpertLoad:
    """Counts the choices of every router in a model, from when it is made."""

    def __init__(self, layers: nn.ModuleList) -> None:
        """Start counting in those of `layers` that have a router."""
        self._counts: dict[int, Tensor] = {
            index: part.count_load()
            for index, layer in enumerate(layers)
            for part in layer.modules()
            if isinstance(part, Router)
        }

    def read(self) -> dict[int, list[int]]:
        """Layer -> how often each expert has been chosen by this process's tokens.

        Waits for the device.
        """
        # The first count is that of padding rows, which go nowhere.
        return {index: counts[1:].tolist() for index, counts in self._counts.items()}
