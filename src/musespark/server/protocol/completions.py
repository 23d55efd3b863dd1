"""POST /v1/completions."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from musespark.server.protocol.base import Few, ResponseModel, SamplingFields, TokenId, Usage
from musespark.server.protocol.chat import ResponseFormat

TokenList = Annotated[Few[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """Prompts to complete as they are, without a chat template."""

    unsupported: ClassVar = {
        "best_of": ((1,), "Use n."),
        "guided_choice": ((), "Use structured_outputs."),
        "guided_grammar": ((), "Use structured_outputs."),
        "guided_json": ((), "Use response_format or structured_outputs."),
        "guided_regex": ((), "Use structured_outputs."),
        "messages": ((), "Conversations go to /v1/chat/completions."),
        "suffix": (("",), "This model only writes forwards."),
    }

    prompt: (
        str
        | TokenList
        | Annotated[Few[str], Field(min_length=1)]
        | Annotated[Few[TokenList], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 16
    """0 is of use with echo and logprobs only."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    """Begin the text with the prompt."""
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = True
    """Put the model's first token before the prompt, where its tokenizer does so."""
    skip_special_tokens: bool = True
    """False shows special tokens by name in the text."""


class CompletionLogprobs(ResponseModel):
    """Of the tokens of a text, in four lists of the same length."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseModel):
    """One of the outputs, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(ResponseModel):
    """A whole response, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
