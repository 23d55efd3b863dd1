"""Tokenizing and its reverse, without the engine."""

from musespark.chat.template import DEFAULT_REASONING_EFFORT
from musespark.chat.tools import parse_tools
from musespark.server.context import Context
from musespark.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


def tokenize(context: Context, request: TokenizeRequest) -> TokenizeResponse:
    """The tokens of a prompt, or of a rendered conversation.

    Raises:
        RequestError: the conversation cannot be rendered.
    """
    context.check_model(request.model)
    if request.messages is None:
        token_ids = context.tokenizer.encode_prompt(
            request.prompt or "", add_special_tokens=request.add_special_tokens
        )
    else:
        prompt = context.chat.prompt(
            request.messages,
            parse_tools(request.tools),
            reasoning_effort=request.reasoning_effort or DEFAULT_REASONING_EFFORT,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )
        token_ids = list(prompt.token_ids)
    response = TokenizeResponse(
        count=len(token_ids), max_model_len=context.supervisor.max_model_len, tokens=token_ids
    )
    if request.return_token_strs:
        response.token_strs = [context.texts[token_id] for token_id in token_ids]
    return response


def detokenize(context: Context, request: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens."""
    context.check_model(request.model)
    text = context.tokenizer.decode(request.tokens, keep_special=not request.skip_special_tokens)
    return DetokenizeResponse(prompt=text)
