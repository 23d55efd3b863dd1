"""`musespark chat`: a conversation in the terminal."""

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from musespark.cli.arguments import Device, Dtype, Model, Revision
from musespark.cli.options import finish, pick, with_fields
from musespark.config.engine import EngineConfig
from musespark.config.sampling import SamplingParams
from musespark.errors import MuseSparkError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from musespark.chat.format import ChatFormat
    from musespark.llm.llm import LLM

_HELP = """\
/new            forget the conversation
/system TEXT    instructions for every answer; without TEXT, none
/effort LEVEL   how long to reason: low, medium, high or xhigh
/quit           end (so does Ctrl-D)
Ctrl-C stops an answer. Anything else is a message."""


@finish
@with_fields(EngineConfig)
def chat(
    model: Model = "spark-mini",
    *,
    system: Annotated[str, typer.Option(help="Instructions for every answer.")] = "",
    reasoning_effort: Annotated[
        str, typer.Option(help="How long to reason: low, medium, high or xhigh.")
    ] = "xhigh",
    temperature: Annotated[
        float | None, typer.Option(help="0 is the most likely answer; default: the model's own.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one answer at most; default: what fits.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    **settings: Any,
) -> None:
    """Talk to a model in the terminal: reasoning dimmed, answers in colour. /help tells more."""
    from rich.console import Console

    from musespark.chat.format import ChatFormat
    from musespark.cli.generate import load_with_progress
    from musespark.config.sampling_defaults import SamplingDefaults

    engine_settings = pick(EngineConfig, settings)
    EngineConfig(**engine_settings)  # bad settings are told before the weights are read
    llm = load_with_progress(
        model, device=device, dtype=dtype, revision=revision, **engine_settings
    )
    params = SamplingDefaults.from_folder(llm.folder).params(
        temperature=temperature, max_tokens=max_tokens, seed=seed
    )
    console = Console(highlight=False)
    conversation = Conversation(console, llm, ChatFormat.from_folder(llm.folder), params)
    conversation.system, conversation.effort = system, reasoning_effort
    console.print(f"[bold]{model}[/] [dim]· /help for help, Ctrl-D to end[/]")
    _talk(conversation, console)


def _talk(conversation: "Conversation", console: "Console") -> None:
    """Read lines until the person has enough."""
    with contextlib.suppress(ImportError):  # arrow keys and past lines, where the system has them
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D ends.[/]")
            continue
        if line in ("/quit", "/exit"):
            return
        try:
            conversation.take(line)
        except MuseSparkError as error:
            console.print(f"error: {error}", style="red", markup=False)


class Conversation:
    """What has been said, and the model that goes on with it."""

    def __init__(
        self, console: "Console", llm: "LLM", chat: "ChatFormat", params: SamplingParams
    ) -> None:
        self._console, self._llm, self._chat, self._params = console, llm, chat, params
        self.system, self.effort = "", "xhigh"
        self.messages: list[dict[str, Any]] = []

    def take(self, line: str) -> None:
        """A command, or a message to answer.

        Raises:
            RequestError: it cannot be answered; it is forgotten then.
        """
        if line.startswith("/"):
            self._command(*line[1:].split(maxsplit=1))
        elif line:
            self.messages.append({"role": "user", "content": line})
            try:
                self._answer()
            except RequestError:
                self.messages.pop()
                raise

    def _command(self, name: str = "", value: str = "") -> None:
        from musespark.chat.template import REASONING_EFFORTS

        if name == "new":
            self.messages.clear()
        elif name == "system":
            self.system = value
        elif name == "effort" and value in REASONING_EFFORTS:
            self.effort = value
        else:
            self._console.print(_HELP, style="dim", markup=False)

    def _answer(self) -> None:
        from musespark.chat.parser import parse_turn
        from musespark.cli.chat_stream import TurnPrinter

        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self._chat.prompt([*system, *self.messages], reasoning_effort=self.effort)
        tokenizer = self._chat.tokenizer
        printer = TurnPrinter(self._console, tokenizer.stream(), self._chat.parser(prompt))
        with (
            self._llm.stream(list(prompt.token_ids), self._params) as generation,
            _ctrl_c() as stopped,
        ):
            for delta in generation:
                printer.push(delta.token_ids)
                if stopped:
                    break
            completion = generation.results()[0]
        printer.finish()
        turn = parse_turn(tokenizer.decode_pieces(completion.token_ids), opening=prompt.opening)
        self.messages.append({"role": "assistant", "content": turn.content})
        rate = completion.timings.decode_tokens_per_second
        speed = f" · {rate:.0f} tokens/s" if rate else ""
        note = " · stopped" if stopped else ""
        self._console.print(f"[dim]{len(completion.token_ids)} tokens{speed}{note}[/]")


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[bool]]:
    """A list that is no longer empty once Ctrl-C was pressed. The model's step is never cut short,
    and a second Ctrl-C, should a step take too long, does what it always does."""
    pressed: list[bool] = []

    def press(*_: object) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
