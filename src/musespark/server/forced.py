"""Tool calls that must happen: `tool_choice` required, or one tool by name.

The model reasons as it always does, and often calls a tool by itself. Only when it is about to
answer instead is its turn taken back to the end of the reasoning and continued with the opening of
a call, whose arguments it then writes. With several tools to choose from, a request in between,
whose output can only be one of their names, lets the model choose.
"""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

from musespark.chat.format import ChatFormat
from musespark.chat.parser import ASSISTANT, State, TurnParser
from musespark.chat.pieces import END_OF_MESSAGE, START, Piece
from musespark.chat.tools import ToolChoice
from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import StructuredOutput
from musespark.engine.client import EngineClient, EngineOutput, EngineRequest
from musespark.engine.request import FinishReason
from musespark.server.runs import EngineRun

# Names have at most 128 characters, and a token is one at least.
_NAME_TOKENS = 160

_NEXT_MESSAGE = (
    Piece(END_OF_MESSAGE, is_special=True),
    Piece(START, is_special=True),
    Piece(ASSISTANT),
)


class ForcedRun:
    """One output, which ends in a call of one of the tools of `choice`."""

    num_outputs = 1

    def __init__(
        self,
        engine: EngineClient,
        request: EngineRequest,
        chat: ChatFormat,
        choice: ToolChoice,
        parser: TurnParser,
        run: EngineRun,
    ) -> None:
        """`run` is `request`, running; `parser` is a fresh one, beginning where its prompt ends."""
        self._engine, self._request, self._chat = engine, request, chat
        self._names, self._run, self._parser = choice.names, run, parser
        self._decoder = chat.tokenizer.stream()
        self._shown: list[int] = []  # of the reasoning
        self._held: list[EngineOutput] = []  # what may turn out to lead to an answer

    @classmethod
    async def start(
        cls,
        engine: EngineClient,
        request: EngineRequest,
        chat: ChatFormat,
        choice: ToolChoice,
        parser: TurnParser,
    ) -> "ForcedRun":
        """Queue the request; raises what `EngineClient.generate` raises."""
        return cls(engine, request, chat, choice, parser, await EngineRun.start(engine, request))

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """See `Run`."""
        is_calling = False
        async for output in self._run.outputs():
            if is_calling:
                yield output
                continue
            for part in _single_tokens(output):
                state = State.CALL if is_calling else self._watch(part)
                is_calling = state is State.CALL
                if state is State.HEADER:
                    self._held.append(part)
                elif state in (State.REASONING, State.CALL):
                    for ready in self._release(part):
                        yield ready
                else:  # an answer, or the end of the turn
                    async for forced in self._call(output):
                        yield forced
                    return
        for ready in self._held:
            yield ready

    async def stop(self, index: int) -> None:
        """See `Run`."""
        await self._run.stop(index)

    async def aclose(self) -> None:
        """See `Run`."""
        await self._run.aclose()

    def _watch(self, part: EngineOutput) -> State:
        """The part of the turn that the tokens belong to; only wanted calls count as calls."""
        for token_id in part.token_ids:
            self._parser.feed(self._decoder.push(token_id))
        state = self._parser.state
        if state is State.CALL and self._parser.recipient not in self._names:
            return State.STRAY
        return state

    def _release(self, part: EngineOutput) -> list[EngineOutput]:
        ready = [*self._held, part]
        self._held.clear()
        self._shown.extend(token_id for output in ready for token_id in output.token_ids)
        return ready

    async def _call(self, last: EngineOutput) -> AsyncGenerator[EngineOutput, None]:
        """Go on with a call after the reasoning that has been shown."""
        encode = self._chat.tokenizer.encode_pieces
        bridge = encode(_NEXT_MESSAGE) if self._shown else []
        before = (*self._request.prompt_token_ids, *self._shown, *bridge)
        name = await self._choose(before)
        (opening,) = self._chat.forced_openings(ToolChoice("required", (name,)))
        added = (*bridge, *encode(opening))
        yield replace(last, token_ids=added, logprobs=None, finish_reason=None)

        params = self._request.params
        if params.max_tokens is not None:
            left = params.max_tokens - len(self._shown) - len(added)
            if left < 1:
                yield replace(last, token_ids=(), logprobs=None, finish_reason=FinishReason.LENGTH)
                return
            params = replace(params, max_tokens=left)
        params = replace(params, min_tokens=0)
        await self._go_on((*before, *encode(opening)), params, self._request.structured_output)
        async for output in self._run.outputs():
            yield output

    async def _choose(self, before: tuple[int, ...]) -> str:
        """The tool that the model would call."""
        if len(self._names) == 1:
            return self._names[0]
        params = replace(
            self._request.params,
            max_tokens=_NAME_TOKENS,
            min_tokens=0,
            logprobs=None,
            stop_token_ids=(),
            ignore_eos=False,
        )
        texts = {f" to={name}": name for name in self._names}
        await self._go_on(before, params, StructuredOutput.choice(list(texts)))
        token_ids = [token async for output in self._run.outputs() for token in output.token_ids]
        return texts.get(self._chat.tokenizer.decode(token_ids), self._names[0])

    async def _go_on(
        self, prompt: tuple[int, ...], params: SamplingParams, rule: StructuredOutput | None
    ) -> None:
        """Put another request in the place of the one that runs."""
        await self._run.aclose()
        # The old one may still be on its way out, so the new one needs a name of its own.
        self._request = replace(self._request, request_id=f"{self._request.request_id}+")
        request = replace(
            self._request, prompt_token_ids=prompt, params=params, structured_output=rule
        )
        self._run = await EngineRun.start(self._engine, request)


def _single_tokens(output: EngineOutput) -> Iterator[EngineOutput]:
    """The same output, one token at a time."""
    last = len(output.token_ids) - 1
    if last < 1:
        yield output
        return
    for i, token_id in enumerate(output.token_ids):
        yield replace(
            output,
            token_ids=(token_id,),
            logprobs=output.logprobs and output.logprobs[i : i + 1],
            finish_reason=output.finish_reason if i == last else None,
        )
