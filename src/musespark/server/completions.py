"""Plain completions: prompts as they are, text out, whole or as it is written."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from musespark.chat.tokenizer import Tokenizer
from musespark.engine.client import EngineRequest
from musespark.errors import RequestError
from musespark.server.context import Context, new_id
from musespark.server.errors import as_api_error
from musespark.server.logprobs import completion_logprobs
from musespark.server.protocol.base import PromptTokensDetails, StreamOptions, Usage
from musespark.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from musespark.server.runs import Run, start_runs
from musespark.server.settings import sampling_params, stop_texts, structured_output
from musespark.server.stream import DONE, event
from musespark.server.text import TextDelta, TextReader, TextRules


def plan_completion(context: Context, request: CompletionRequest) -> list[EngineRequest]:
    """Check and tokenize; one request to the engine for each prompt.

    Raises:
        RequestError: the request can never be honoured.
    """
    raw_prompts = _as_list(request.prompt)
    context.check_choices(request.n * len(raw_prompts))
    prompts = [_token_ids(context.tokenizer, request, prompt) for prompt in raw_prompts]
    wants_prompt_logprobs = request.echo and request.logprobs is not None
    if wants_prompt_logprobs and request.n > 1:
        raise RequestError("echo: with logprobs, n must be 1.")
    params = sampling_params(
        request,
        context.defaults,
        # A token is made all the same, and thrown away.
        max_tokens=max(request.max_tokens, 1),
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if wants_prompt_logprobs else None,
    )
    rule = structured_output(request.response_format, request.structured_outputs, None)
    name = new_id("cmpl")
    return [EngineRequest(f"{name}-{i}", prompt, params, rule) for i, prompt in enumerate(prompts)]


def _as_list(raw: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """The prompts, in whichever of the four shapes they came."""
    if isinstance(raw, str) or isinstance(raw[0], int):
        return [raw]
    return raw


def _token_ids(
    tokenizer: Tokenizer, request: CompletionRequest, prompt: str | list[int]
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    return tuple(tokenizer.encode_prompt(prompt, add_special_tokens=request.add_special_tokens))


class CompletionJob:
    """A completion request that the engine has accepted. Whoever has one closes it."""

    def __init__(
        self,
        context: Context,
        request: CompletionRequest,
        engine_requests: Sequence[EngineRequest],
        run: Run,
    ) -> None:
        self._context, self._request, self._run = context, request, run
        self._prompts = [one.prompt_token_ids for one in engine_requests]
        self._id = engine_requests[0].request_id.rpartition("-")[0]
        rules = TextRules(
            stop=stop_texts(request),
            min_tokens=request.min_tokens,
            max_tokens=request.max_tokens,
            keep_special=not request.skip_special_tokens,
        )
        self._readers = [
            TextReader(context.tokenizer, rules, prompt if request.echo else None)
            for prompt in self._prompts
            for _ in range(request.n)
        ]
        self._offsets = [0] * len(self._readers)
        self._cached = [0] * len(self._prompts)
        self._created = int(time.time())

    @classmethod
    async def start(cls, context: Context, request: CompletionRequest) -> "CompletionJob":
        """Queue a request.

        Raises:
            MuseSparkError: it cannot be honoured, or not now.
        """
        context.check_model(request.model)
        engine = context.engine
        requests = await asyncio.to_thread(plan_completion, context, request)
        for one in requests:
            context.check_length(len(one.prompt_token_ids), engine.info.max_model_len, "prompt")
        return cls(context, request, requests, await start_runs(engine, requests))

    async def aclose(self) -> None:
        """End it, finished or not."""
        await self._run.aclose()

    async def complete(self) -> Completion:
        """The whole response.

        Raises:
            EngineError: the engine died or shut down before the end.
        """
        texts = [TextDelta() for _ in self._readers]
        async for index, delta in self._deltas():
            texts[index].add(delta)
        choices = [self._choice(index, text) for index, text in enumerate(texts)]
        return self._completion(choices, self._usage())

    async def events(self) -> AsyncGenerator[str, None]:
        """The server-sent events of the response. Errors come as the last event."""
        options = self._request.stream_options or StreamOptions()
        try:
            async for index, delta in self._deltas():
                if delta.text or delta.token_ids or delta.finish_reason is not None:
                    response = self._completion([self._choice(index, delta)])
                    if options.continuous_usage_stats:
                        response.usage = self._usage()
                    elif options.include_usage:
                        response.usage = None  # as null: the counts come at the end
                    yield event(response.to_json())
            if options.include_usage:
                yield event(self._completion([], self._usage()).to_json())
            yield DONE
        except Exception as error:  # the status has been sent already
            yield event(as_api_error(error).body_text())

    async def _deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """What each of the texts gains, in the order it comes."""
        watch = self._context.metrics.stopwatch(sum(map(len, self._prompts)))
        num_running = len(self._readers)
        async for output in self._run.outputs():
            watch.observe(output)
            self._cached[output.index // self._request.n] = output.num_cached_tokens
            reader = self._readers[output.index]
            if reader.finish_reason is not None:
                continue
            delta = reader.push(output)
            if delta.finish_reason is not None:
                num_running -= 1
                if output.finish_reason is None:
                    await self._run.stop(output.index)
            yield output.index, delta
            if num_running == 0:
                return

    def _choice(self, index: int, delta: TextDelta) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=self._logprobs(index, delta),
            finish_reason=delta.finish_reason,
        )

    def _logprobs(self, index: int, delta: TextDelta) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        texts, offset = self._context.texts, self._offsets[index]
        self._offsets[index] += sum(len(texts[token_id]) for token_id in delta.token_ids)
        return completion_logprobs(
            delta.token_ids, delta.logprobs, texts, self._request.logprobs, offset
        )

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> Completion:
        completion = Completion(
            id=self._id, created=self._created, model=self._context.model_name, choices=choices
        )
        if usage is not None:
            completion.usage = usage
        return completion

    def _usage(self) -> Usage:
        num_prompt = sum(map(len, self._prompts))
        num_output = sum(reader.num_tokens for reader in self._readers)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached)),
        )
