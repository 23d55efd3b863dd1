"""LLM: load a model, then generate."""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from musespark.chat.events import collect
from musespark.chat.format import ChatFormat
from musespark.chat.messages import Message
from musespark.chat.template import DEFAULT_REASONING_EFFORT
from musespark.chat.tokenizer import Tokenizer
from musespark.chat.tools import Tool, parse_tools
from musespark.checkpoint.load import Progress
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import StructuredOutput
from musespark.engine.client import EngineStats
from musespark.engine.request import FinishReason
from musespark.errors import RequestError
from musespark.llm.answer_scope import answer_scope
from musespark.llm.deployment import open_engine
from musespark.llm.drafting import with_chosen_draft
from musespark.llm.generation import Generation, Output
from musespark.llm.output_decoder import OutputDecoder
from musespark.llm.outputs import ChatCompletion, Completion

Prompt = str | Sequence[int]


class LLM:
    """A loaded model that runs any number of prompts together.

    >>> llm = LLM("spark-mini")
    >>> llm.generate("What is 12 + 30?", SamplingParams(temperature=0, max_tokens=64))[0].text
    """

    def __init__(
        self,
        model: str | Path = "spark-mini",
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        progress: Progress | None = None,
        **engine_settings: Any,
    ) -> None:
        """Load the weights and size the KV cache.

        Args:
            model: a packaged model's name, a folder, or a Hugging Face repository id.
            device: "cpu" or "cuda"; None: CUDA where there is a device.
            dtype: "bfloat16", "float32" or "float64"; None: bfloat16, or float32 on a CPU
                without bfloat16 products.
            revision: branch, tag or commit of a Hugging Face repository.
            progress: told the bytes loaded so far and in all.
            engine_settings: fields of `EngineConfig`, such as max_model_len, max_num_seqs or
                tensor_parallel_size. A model that is spread over processes starts them, so a script
                must do that under `if __name__ == "__main__":`.

        Raises:
            ConfigError: the config or a setting is unsupported.
            CheckpointError: files are missing, damaged, or do not fit the config.
            CapacityError: the model's length does not fit into memory.
        """
        engine_config = with_chosen_draft(EngineConfig(**engine_settings), model)
        self.folder = resolve_checkpoint(str(model), revision)
        self.config = DecoderConfig.from_folder(self.folder)
        self._engine, self.info, close = open_engine(
            model,
            self.folder,
            engine_config,
            revision=revision,
            device=device,
            dtype=dtype,
            progress=progress,
        )
        # When it is closed, forgotten, or Python ends.
        self._close = weakref.finalize(self, close)
        self.max_model_len = self.info.max_model_len
        self._owners: weakref.WeakValueDictionary[int, Generation] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """Abort what runs, and end the processes that the model is spread over, if any."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None if it has none."""
        if not (self.folder / "tokenizer.json").exists():
            return None
        return Tokenizer.from_folder(self.folder)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the checkpoint writes conversations."""
        return ChatFormat.from_folder(self.folder, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_output: StructuredOutput | None = None,
    ) -> list[Completion]:
        """Complete every prompt; prompts of any mix of lengths run together.

        Args:
            prompts: one prompt or several; each a text, or a list of token ids.
            params: for all prompts, or one per prompt; None: the defaults.
            structured_output: what every output must look like; None: anything.

        Returns:
            One completion per prompt, in order; `n` of them, side by side, where `n` asks for
            more.

        Raises:
            RequestError: a prompt or setting cannot be honoured; nothing has run then.
        """
        with self.stream(prompts, params, structured_output=structured_output) as generation:
            for _ in generation:
                pass
            return generation.results()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_output: StructuredOutput | None = None,
    ) -> Generation:
        """Like `generate`, as an iterator over what each step adds.

        Close it (or use it in a `with` statement) to stop early; `results()` then holds what was
        produced until there.
        """
        token_prompts = [self._token_ids(prompt) for prompt in _as_list(prompts)]
        settings = _one_each(params, len(token_prompts))
        self._check_stop_texts(settings)
        grammar = None
        if structured_output is not None:
            grammar = self._engine.compile_grammar(structured_output)
        outputs: dict[tuple[int, int], Output] = {}
        request_ids: list[int] = []
        try:
            for index, (prompt, setting) in enumerate(zip(token_prompts, settings, strict=True)):
                request_ids.append(self._engine.add_request(prompt, setting, grammar))
                for choice in range(setting.n):
                    output = Output(index, choice, prompt, setting, self.tokenizer)
                    outputs[request_ids[-1], choice] = output
        except RequestError:
            for request_id in request_ids:
                self._engine.abort(request_id)
            raise
        generation = Generation(self._engine, outputs, self._step)
        self._owners.update(dict.fromkeys(request_ids, generation))
        return generation

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        reasoning_effort: str = DEFAULT_REASONING_EFFORT,
        continue_final_message: bool = False,
        structured_output: StructuredOutput | None = None,
    ) -> ChatCompletion:
        """Write the assistant's next turn.

        Args:
            messages: the conversation so far, in OpenAI's shapes.
            params: how to sample; None: the defaults. `n` must be 1.
            tools: functions that the model may call, in OpenAI's shape.
            reasoning_effort: low, medium, high or xhigh.
            continue_final_message: go on with the last message, the assistant's own.
            structured_output: what the answer must look like; reasoning and tool calls are free.

        Raises:
            RequestError: a message, tool or setting cannot be honoured.
            CheckpointError: the model has no chat template, or no tokenizer.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n: must be 1 for chat, found {params.n}. Call it several times.")
        chat, declared = self.chat_format, parse_tools(tools)
        prompt = chat.prompt(
            messages,
            declared,
            reasoning_effort=reasoning_effort,
            continue_final_message=continue_final_message,
        )
        if not params.ignore_eos:
            ends = (*params.stop_token_ids, *sorted(chat.tokenizer.stop_ids))
            params = dataclasses.replace(params, stop_token_ids=ends)
        if structured_output is not None:
            scope = answer_scope(chat)
            structured_output = dataclasses.replace(structured_output, scope=scope)
        completion = self.generate(
            list(prompt.token_ids), params, structured_output=structured_output
        )[0]
        decoder = OutputDecoder(chat.tokenizer, params.stop, params.min_tokens)
        pieces = decoder.push(completion.token_ids, last=True)
        parser = chat.parser(prompt, declared)
        is_truncated = completion.finish_reason != FinishReason.STOP
        events = [*parser.feed(pieces), *parser.finish(is_truncated=is_truncated)]
        return ChatCompletion(collect(events), completion)

    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self._engine.stats()

    def _step(self) -> None:
        """Run the engine once and hand every token to the call it belongs to."""
        for token in self._engine.step():
            if (owner := self._owners.get(token.request_id)) is not None:
                owner.take(token)
            else:  # its iterator was dropped without being closed
                self._engine.abort(token.request_id)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError(
                f"{self.folder} has no tokenizer.json, so prompts must be lists of token ids."
            )
        return self.tokenizer.encode_prompt(prompt)

    def _check_stop_texts(self, settings: Sequence[SamplingParams]) -> None:
        if any(setting.stop for setting in settings) and self.tokenizer is None:
            raise RequestError(
                f"stop: {self.folder} has no tokenizer.json, so output has no text to stop at. "
                "Use stop_token_ids."
            )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a text and a list of token ids are one each."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters were given for {count} prompts.")
    return list(params)
