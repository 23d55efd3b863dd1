"""Printing one chat turn as it streams: reasoning dimmed, answer bold."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from musespark.chat.detokenizer import IncrementalDecoder
from musespark.chat.events import CallComplete, ContentDelta, Event, ReasoningDelta
from musespark.chat.parser import TurnParser


class TurnPrinter:
    """Takes tokens, prints the turn they spell."""

    def __init__(self, console: Console, decoder: IncrementalDecoder, parser: TurnParser) -> None:
        self._console, self._decoder, self._parser = console, decoder, parser
        self._section: type[Event] | None = None

    def push(self, token_ids: Iterable[int]) -> None:
        """Print what these tokens add."""
        for token_id in token_ids:
            self._print(self._parser.feed(self._decoder.push(token_id)))

    def finish(self) -> None:
        """Print what was held back and end the line."""
        self._print(self._parser.feed(self._decoder.flush()))
        self._print(self._parser.finish(is_truncated=False))
        self._console.print()

    def _print(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, ReasoningDelta):
                self._write(event, event.text, "dim italic")
            elif isinstance(event, ContentDelta):
                self._write(event, event.text, "bold green")
            elif isinstance(event, CallComplete):
                call = f"{event.call.name}({event.call.arguments})"
                self._write(event, call, "yellow")

    def _write(self, event: Event, text: str, style: str) -> None:
        if self._section is not None and self._section is not type(event):
            self._console.print()
        self._section = type(event)
        # Model output is data: neither markup nor emoji codes in it mean anything.
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
