"""POST /tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from musespark.server.protocol.base import Few, RequestModel, ResponseModel, TokenId
from musespark.server.protocol.chat import RawMessage, RawTool


class TokenizeRequest(RequestModel):
    """A prompt, or a conversation; exactly one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Few[RawMessage], Field(min_length=1)] | None = None
    tools: Few[RawTool] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenizeResponse(ResponseModel):
    """The tokens, and how many fit."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Tokens to turn into text."""

    model: str | None = None
    tokens: Few[TokenId]
    skip_special_tokens: bool = False


class DetokenizeResponse(ResponseModel):
    """The text."""

    prompt: str
