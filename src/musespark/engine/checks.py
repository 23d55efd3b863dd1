"""What can be said of a request before it runs."""

from collections.abc import Sequence

from musespark.config.sampling import SamplingParams
from musespark.errors import RequestError


def check_request(
    prompt: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int
) -> None:
    """Refuse what can never be honoured.

    Raises:
        RequestError: an empty prompt, a token outside the vocabulary, or a prompt that leaves no
            room for an answer.
    """
    if not prompt:
        raise RequestError("The prompt is empty: it must hold at least one token.")
    given = (*params.stop_token_ids, *dict(params.logit_bias))
    for token_id in (min(prompt), max(prompt), *given):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"Token id {token_id} is outside the model's vocabulary (0 to {vocab_size - 1})."
            )
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens, but prompt and output together may have "
            f"{max_model_len} (max_model_len). Shorten it, or raise max_model_len."
        )
