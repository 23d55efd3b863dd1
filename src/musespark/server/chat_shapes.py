"""What a turn looks like in OpenAI's shapes, whole and in chunks."""

from musespark.chat.tools import ToolCall
from musespark.server.protocol.chat import (
    AssistantMessage,
    BrokenToolCall,
    ChatChoice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FunctionCall,
    ToolCallMessage,
)
from musespark.server.turn import TurnDelta


def whole_choice(
    index: int, turn: TurnDelta, logprobs: ChoiceLogprobs | None, *, with_reasoning: bool
) -> ChatChoice:
    """A finished turn."""
    # A turn of calls alone has no content; any other has some, even if empty.
    content = None if turn.calls and not turn.content else turn.content
    message = AssistantMessage(content=content, refusal=None)
    if turn.reasoning and with_reasoning:
        message.reasoning_content = turn.reasoning
    if turn.calls:
        message.tool_calls = [_call(call) for _, call in turn.calls]
    if turn.broken:
        message.broken_tool_calls = _broken(turn)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=logprobs,
        finish_reason=turn.finish_reason or "stop",
    )


def first_chunk(index: int) -> ChunkChoice:
    """Opens the message, before anything is known of it."""
    return chunk(index, Delta(role="assistant", content=""))


def chunk(index: int, delta: Delta, logprobs: ChoiceLogprobs | None = None) -> ChunkChoice:
    """More of a message."""
    return ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)


def last_chunk(index: int, turn: TurnDelta) -> ChunkChoice:
    """Closes the message."""
    return ChunkChoice(index=index, delta=Delta(), logprobs=None, finish_reason=turn.finish_reason)


def as_delta(turn: TurnDelta, *, with_reasoning: bool) -> Delta | None:
    """What is new in the message; None if nothing that the client sees."""
    delta = Delta()
    if turn.reasoning and with_reasoning:
        delta.reasoning_content = turn.reasoning
    if turn.content or turn.answer_tokens:
        delta.content = turn.content
    if turn.calls:
        delta.tool_calls = [_indexed_call(index, call) for index, call in turn.calls]
    if turn.broken:
        delta.broken_tool_calls = _broken(turn)
    return delta if delta.model_fields_set else None


def _call(call: ToolCall) -> ToolCallMessage:
    return ToolCallMessage(
        id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments)
    )


def _indexed_call(index: int, call: ToolCall) -> ToolCallMessage:
    message = _call(call)
    message.index = index
    return message


def _broken(turn: TurnDelta) -> list[BrokenToolCall]:
    return [
        BrokenToolCall(
            recipient=broken.recipient,
            text=broken.text,
            reason=broken.reason,
            is_truncated=broken.is_truncated,
        )
        for broken in turn.broken
    ]
