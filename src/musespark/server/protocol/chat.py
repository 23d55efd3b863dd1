"""POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema, model_validator

from musespark.server.protocol.base import Few, RequestModel, ResponseModel, SamplingFields, Usage

# The chat package checks messages and tools, and its errors name the message and the field. Here
# only their outer shape is told, for the OpenAPI document.
RawMessage = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "title": "Message",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "null"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {
                                    "type": {"const": "text"},
                                    "text": {"type": "string"},
                                },
                            },
                        },
                    ]
                },
                "reasoning_content": {"type": ["string", "null"]},
                "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
                "tool_call_id": {"type": ["string", "null"]},
                "name": {"type": ["string", "null"]},
            },
        }
    ),
]
RawTool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "title": "Tool",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "parameters": {"type": "object"},
                        "strict": {"type": ["boolean", "null"]},
                    },
                },
            },
        }
    ),
]


class JsonSchemaFormat(RequestModel):
    """The schema of `response_format`."""

    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted; a schema is always kept to strictly here."""


class ResponseFormat(RequestModel):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "the field json_schema belongs to the type json_schema, and only to it"
            )
        return self


class ChatRequest(SamplingFields):
    """A conversation to continue."""

    unsupported: ClassVar = {
        "audio": ((), "This server runs the text model only."),
        "best_of": ((1,), "Use n."),
        "chat_template": ((), "The template is the checkpoint's; see chat_template_kwargs."),
        "function_call": ((), "Use tool_choice."),
        "functions": ((), "Use tools."),
        "guided_choice": ((), "Use structured_outputs."),
        "guided_grammar": ((), "Use structured_outputs."),
        "guided_json": ((), "Use response_format or structured_outputs."),
        "guided_regex": ((), "Use structured_outputs."),
        "modalities": ((["text"],), "This server runs the text model only."),
        "moderation": ((), "Leave it out."),
        "reasoning": ((), "Use reasoning_effort."),
        "verbosity": (("medium",), "Ask for a short or long answer in a message."),
        "web_search_options": ((), "Give the model a tool of your own."),
    }

    messages: Annotated[Few[RawMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Few[RawTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None

    include_reasoning: bool = True
    """False leaves the reasoning out of the response; the model reasons all the same."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Go on writing the last message, which must be the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further values for the chat template."""


class FunctionCall(ResponseModel):
    """A function and its arguments, which are JSON as text."""

    name: str
    arguments: str


class ToolCallMessage(ResponseModel):
    """One tool call."""

    index: int | None = None
    """Which call of the turn; in streams only."""
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class BrokenToolCall(ResponseModel):
    """What the model addressed to a tool without making a call that can be read.

    An extension; clients that do not know it see no call, which is right.
    """

    recipient: str
    text: str
    reason: str
    is_truncated: bool


class TopLogprob(ResponseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was chosen at a position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseModel):
    """Of the tokens of the answer; reasoning and tool calls have none."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class AssistantMessage(ResponseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    broken_tool_calls: list[BrokenToolCall] | None = None


class ChatChoice(ResponseModel):
    """One of the n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ResponseModel):
    """A whole response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(ResponseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    broken_tool_calls: list[BrokenToolCall] | None = None


class ChunkChoice(ResponseModel):
    """What a chunk adds to one of the n answers."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(ResponseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
