"""Chat completions: a conversation in, the assistant's turn out, whole or as it is written."""

import time
from collections.abc import AsyncGenerator

from musespark.server.chat_plan import ChatPlan, new_parser, start_chat
from musespark.server.chat_shapes import as_delta, chunk, first_chunk, last_chunk, whole_choice
from musespark.server.context import Context
from musespark.server.errors import as_api_error
from musespark.server.logprobs import chat_logprobs
from musespark.server.protocol.base import (
    CompletionTokensDetails,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from musespark.server.protocol.chat import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    ChunkChoice,
)
from musespark.server.runs import Run
from musespark.server.stream import DONE, event
from musespark.server.turn import TurnDelta, TurnReader


class ChatJob:
    """A chat request that the engine has accepted. Whoever has one closes it."""

    def __init__(self, context: Context, request: ChatRequest, plan: ChatPlan, run: Run) -> None:
        self._context, self._request, self._plan, self._run = context, request, plan, run
        self._readers = [
            TurnReader(context.tokenizer.stream(), new_parser(context, plan), plan.rules)
            for _ in range(request.n)
        ]
        self._num_cached_tokens = 0
        self._created = int(time.time())

    @classmethod
    async def start(cls, context: Context, request: ChatRequest) -> "ChatJob":
        """Queue a request.

        Raises:
            MuseSparkError: it cannot be honoured, or not now.
        """
        plan, run = await start_chat(context, request)
        return cls(context, request, plan, run)

    async def aclose(self) -> None:
        """End it, finished or not."""
        await self._run.aclose()

    async def complete(self) -> ChatCompletion:
        """The whole response.

        Raises:
            EngineError: the engine died or shut down before the end.
        """
        turns = [TurnDelta() for _ in self._readers]
        async for index, delta in self._deltas():
            turns[index].add(delta)
        with_reasoning = self._request.include_reasoning
        return ChatCompletion(
            id=self._plan.engine_request.request_id,
            created=self._created,
            model=self._context.model_name,
            choices=[
                whole_choice(index, turn, self._logprobs(turn), with_reasoning=with_reasoning)
                for index, turn in enumerate(turns)
            ],
            usage=self._usage(),
        )

    async def events(self) -> AsyncGenerator[str, None]:
        """The server-sent events of the response. Errors come as the last event."""
        options = self._request.stream_options or StreamOptions()
        try:
            for index in range(len(self._readers)):
                yield self._event(options, first_chunk(index))
            async for index, turn in self._deltas():
                delta = as_delta(turn, with_reasoning=self._request.include_reasoning)
                if delta is not None:
                    yield self._event(options, chunk(index, delta, self._logprobs(turn)))
                if turn.finish_reason is not None:
                    yield self._event(options, last_chunk(index, turn))
            if options.include_usage:
                yield event(self._chunk([], self._usage()).to_json())
            yield DONE
        except Exception as error:  # the status has been sent already
            yield event(as_api_error(error).body_text())

    async def _deltas(self) -> AsyncGenerator[tuple[int, TurnDelta], None]:
        """What each of the answers gains, in the order it comes."""
        watch = self._context.metrics.stopwatch(len(self._plan.prompt.token_ids))
        num_running = len(self._readers)
        async for output in self._run.outputs():
            watch.observe(output)
            self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
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

    def _event(self, options: StreamOptions, choice: ChunkChoice) -> str:
        chunk = self._chunk([choice])
        if options.continuous_usage_stats:
            chunk.usage = self._usage()
        elif options.include_usage:
            chunk.usage = None  # as null: the counts come at the end
        return event(chunk.to_json())

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        chunk = ChatChunk(
            id=self._plan.engine_request.request_id,
            created=self._created,
            model=self._context.model_name,
            choices=choices,
        )
        if usage is not None:
            chunk.usage = usage
        return chunk

    def _logprobs(self, turn: TurnDelta) -> ChoiceLogprobs | None:
        if not self._request.logprobs:
            return None
        num_top = self._request.top_logprobs or 0
        return chat_logprobs(turn.answer_tokens, self._context.texts, num_top)

    def _usage(self) -> Usage:
        num_prompt = len(self._plan.prompt.token_ids)
        num_output = sum(reader.num_tokens for reader in self._readers)
        num_reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning),
        )
