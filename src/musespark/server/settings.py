"""From the fields of a request to the engine's settings."""

from collections.abc import Mapping
from typing import Any

from musespark.chat.strict_json import dump_json
from musespark.config.sampling import SamplingParams
from musespark.config.sampling_defaults import SamplingDefaults
from musespark.config.structured_output import AnswerScope, StructuredOutput
from musespark.errors import RequestError
from musespark.server.protocol.base import SamplingFields, StructuredOutputs
from musespark.server.protocol.chat import ResponseFormat


def sampling_params(
    request: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The settings of one request. Stop texts are left out: the engine sees no text.

    Raises:
        RequestError: a value outside its range.
    """
    return defaults.params(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,  # vLLM's clients say -1 for "all"
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        n=request.n,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_logit_bias(request.logit_bias or {}),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        # OpenAI's seeds may be negative.
        seed=None if request.seed is None else request.seed % 2**63,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def stop_texts(request: SamplingFields) -> tuple[str, ...]:
    """The texts that end the output.

    Raises:
        RequestError: one of them is empty.
    """
    stop = request.stop or ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in texts:
        raise RequestError("stop: a stop text must not be empty.")
    return texts


def _logit_bias(raw: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in raw.items()}
    except ValueError:
        raise RequestError("logit_bias: must map token ids to numbers.") from None


def structured_output(
    response_format: ResponseFormat | None,
    rules: StructuredOutputs | None,
    scope: AnswerScope | None,
) -> StructuredOutput | None:
    """The rule that the output must follow, if any.

    Raises:
        RequestError: more than one rule.
    """
    found = [*_from_format(response_format, scope), *_from_rules(rules, scope)]
    if len(found) > 1:
        raise RequestError("structured_outputs: give one rule only, here or in response_format.")
    return found[0] if found else None


def _from_format(
    response_format: ResponseFormat | None, scope: AnswerScope | None
) -> list[StructuredOutput]:
    if response_format is None or response_format.type == "text":
        return []
    if response_format.json_schema is None:
        return [StructuredOutput.json_object(scope)]
    return [StructuredOutput.json_schema(_as_json(response_format.json_schema.json_schema), scope)]


def _from_rules(
    rules: StructuredOutputs | None, scope: AnswerScope | None
) -> list[StructuredOutput]:
    found = []
    if rules is not None:
        if rules.json_schema is not None:
            found.append(StructuredOutput.json_schema(_as_json(rules.json_schema), scope))
        if rules.json_object:
            found.append(StructuredOutput.json_object(scope))
        if rules.regex is not None:
            found.append(StructuredOutput.regex(rules.regex, scope))
        if rules.choice is not None:
            found.append(StructuredOutput.choice(rules.choice, scope))
    return found


def _as_json(schema: dict[str, Any] | str) -> str:
    try:
        return schema if isinstance(schema, str) else dump_json(schema)
    except (TypeError, ValueError) as error:
        raise RequestError(f"response_format: the schema is not JSON: {error}.") from None
