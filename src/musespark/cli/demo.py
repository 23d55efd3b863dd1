"""`musespark demo`: the packaged model answers a few questions, reasoning first."""

from typing import Annotated

import typer

QUESTIONS = (
    "What is 347 + 86?",
    "Sort these numbers: 45, 12, 78, 30",
    "Reverse the word planet",
)


def demo(
    question: Annotated[
        list[str] | None, typer.Option(help="Ask this instead; may be given several times.")
    ] = None,
) -> None:
    """Ask the packaged model some questions and watch it reason."""
    from rich.console import Console

    from musespark.chat.format import ChatFormat
    from musespark.cli.chat_stream import TurnPrinter
    from musespark.cli.generate import load_with_progress
    from musespark.config.sampling import SamplingParams

    console = Console(highlight=False)
    llm = load_with_progress("spark-mini", device="cpu")
    chat = ChatFormat.from_folder(llm.folder, llm.tokenizer)
    layers, experts = llm.config.num_hidden_layers, llm.config.num_local_experts
    console.print(f"[bold]spark-mini[/]: {layers} layers, {experts} experts, on the CPU\n")
    tokens = seconds = 0.0
    for text in question or QUESTIONS:
        console.print("[cyan]?[/] ", end="")
        console.print(text, markup=False, style="bold cyan")
        prompt = chat.prompt([{"role": "user", "content": text}])
        printer = TurnPrinter(console, chat.tokenizer.stream(), chat.parser(prompt))
        params = SamplingParams(temperature=0, max_tokens=512)
        with llm.stream(list(prompt.token_ids), params) as generation:
            for delta in generation:
                printer.push(delta.token_ids)
            completion = generation.results()[0]
        printer.finish()
        console.print()
        tokens += len(completion.token_ids)
        seconds += completion.timings.total
    console.print(f"[dim]{tokens:.0f} tokens in {seconds:.1f} s, one question at a time[/]")
