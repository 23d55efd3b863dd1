"""`musespark generate`: complete one prompt, streaming."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from musespark.cli.arguments import Device, Dtype, Model, Revision
from musespark.cli.options import finish, pick, with_fields
from musespark.config.engine import EngineConfig
from musespark.config.sampling import SamplingParams

if TYPE_CHECKING:
    from musespark.llm.generation import Generation
    from musespark.llm.llm import LLM


@finish
@with_fields(EngineConfig)
@with_fields(SamplingParams, without=("n", "prompt_logprobs"), temperature=0.0, max_tokens=256)
def generate(
    model: Model = "spark-mini",
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to complete.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File that holds the text to complete.")
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="Token ids to complete, such as 1,2,3.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")
    ] = False,
    **settings: Any,
) -> None:
    """Complete a prompt: greedy unless --temperature says otherwise. Ctrl-C ends it early."""
    request = _read_prompt(prompt, prompt_file, token_ids)
    params = SamplingParams(**pick(SamplingParams, settings))
    engine_settings = pick(EngineConfig, settings)
    EngineConfig(**engine_settings)  # bad settings are told before the weights are read
    llm = load_with_progress(
        model, device=device, dtype=dtype, revision=revision, **engine_settings
    )
    with llm.stream(request, params) as generation:
        interrupted = _run(generation, show=not as_json, has_text=llm.tokenizer is not None)
        completion = generation.results()[0]
    if as_json:
        report = completion.to_dict()
        if (speculation := llm.stats().speculation) is not None:
            report["speculation"] = speculation.summary()
        print(json.dumps(report))
    if interrupted:
        raise typer.Exit(130)


def load_with_progress(model: str, **settings: Any) -> "LLM":
    """The model, with a progress bar on a terminal while it loads."""
    from musespark.checkpoint.progress import terminal_progress
    from musespark.llm.llm import LLM

    with terminal_progress() as progress:
        return LLM(model, progress=progress, **settings)


def _run(generation: "Generation", *, show: bool, has_text: bool) -> bool:
    """Drain the generation, printing as it comes; returns whether Ctrl-C ended it."""
    try:
        for delta in generation:
            if show:
                piece = delta.text if has_text else f"{delta.token_ids[0]} "
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        generation.close()
        return True
    finally:
        if show:
            print()
    return False


def _read_prompt(
    prompt: str | None, prompt_file: Path | None, token_ids: str | None
) -> str | list[int]:
    """The one prompt that was given, in whichever of the three ways."""
    given = [value for value in (prompt, prompt_file, token_ids) if value is not None]
    if len(given) != 1:
        raise typer.BadParameter(
            "give exactly one of --prompt, --prompt-file and --token-ids "
            f"({len(given)} were given)."
        )
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--prompt-file {prompt_file}: {error}") from None
    assert token_ids is not None  # noqa: S101
    try:
        return [int(token) for token in token_ids.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--token-ids: whole numbers separated by commas, found {token_ids!r}."
        ) from None
