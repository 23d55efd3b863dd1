"""Finding stop texts in a stream of text, across any split into pieces."""

from collections.abc import Sequence


class StopTextFinder:
    """Passes text on, except for what may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that is now known to be output. After `found` turns true, nothing more is."""
        self._held += text
        hits = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            self.found = True
            return self._take(min(hits))
        longest = max((self._overlap(stop) for stop in self._stops), default=0)
        return self._take(len(self._held) - longest)

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        return "" if self.found else self._take(len(self._held))

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken
