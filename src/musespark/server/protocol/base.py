"""What all requests and responses share.

A request may hold every field OpenAI has. Those without a meaning here are accepted, those that
would change the answer and cannot be honoured are refused by name, and a field nobody knows is
refused with the nearest match: a misspelt setting must not be dropped in silence.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")

# Accepted and without effect: labels for OpenAI's own bookkeeping, and hints about speed.
BOOKKEEPING = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


class RequestModel(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # Name -> the values that change nothing, and what to do instead.
    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    bookkeeping: ClassVar[frozenset[str]] = BOOKKEEPING

    @model_validator(mode="before")
    @classmethod
    def _sort_fields(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = {}
        names = cls.names()
        for name, value in data.items():
            if name in names:
                kept[name] = value
            elif name in cls.unsupported:
                cls._check_neutral(name, value)
            elif name not in cls.bookkeeping:
                raise _field_error(name, f"Unknown field {name[:99]!r}.{cls._nearest(name)}")
        # Null means what leaving the field out means.
        return {name: value for name, value in kept.items() if value is not None}

    @classmethod
    def names(cls) -> set[str]:
        """The fields, as they are called on the wire."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def _check_neutral(cls, name: str, value: Any) -> None:
        neutral, advice = cls.unsupported[name]
        if value is not None and value not in neutral:
            raise _field_error(name, f"{name} is not supported here. {advice}")

    @classmethod
    def _nearest(cls, name: str) -> str:
        known = sorted({*cls.names(), *cls.unsupported})
        similar = difflib.get_close_matches(name, known, n=1)
        return f" Did you mean {similar[0]!r}?" if similar else ""


def _at_most_1024(value: Any) -> Any:
    """Counts before anything looks at the entries, each of which may be an error."""
    if isinstance(value, Mapping) and len(value) > 1024:
        raise ValueError("must have at most 1024 entries")
    return value


def _field_error(name: str, message: str) -> PydanticCustomError:
    # The text goes in as a value: as a template, braces in a name would be placeholders. Half of
    # a surrogate pair has no UTF-8 form, which pydantic needs.
    name = name[:99].encode("utf-8", "backslashreplace").decode()
    return PydanticCustomError("field", "{message}", {"message": message, "param": name})


class ResponseModel(BaseModel):
    """Base of all responses. What is optional and was never set is left out of the JSON."""

    _constants: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._constants = frozenset(
            name for name, field in cls.model_fields.items() if isinstance(field.default, str)
        )

    def model_post_init(self, context: Any, /) -> None:  # noqa: ARG002
        """Count the constant fields, such as `object`, as set."""
        self.model_fields_set.update(self._constants)

    def to_json(self) -> str:
        """JSON in one line."""
        return self.model_dump_json(exclude_unset=True)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
"""Bounds that any vocabulary fits in, so that numbers of any size cannot travel further."""


Few = Annotated[list[T], Field(fail_fast=True)]
"""A list that is given up at its first error: a long one full of errors would take long to tell."""


class StreamOptions(RequestModel):
    """What a stream tells beside the output."""

    include_usage: bool = False
    """End with a chunk that holds the token counts."""
    continuous_usage_stats: bool = False
    """Token counts so far in every chunk."""
    include_obfuscation: bool = False
    """Accepted and without effect: no padding is added."""


class StructuredOutputs(RequestModel):
    """vLLM's field for output that must follow a rule; exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[Few[str], Field(min_length=1, max_length=1024)] | None = None
    unsupported: ClassVar = {
        "grammar": ((), "Use json, json_object, regex or choice."),
        "structural_tag": ((), "Use json, json_object, regex or choice."),
    }


class SamplingFields(RequestModel):
    """How tokens are chosen; the same in chat and plain completions.

    Ranges are those of `SamplingParams`, which checks them. Those OpenAI does not have are vLLM's.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: str | Annotated[Few[str], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], BeforeValidator(_at_most_1024)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[Few[TokenId], Field(max_length=128)] | None = None
    structured_outputs: StructuredOutputs | None = None


class PromptTokensDetails(ResponseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """Of the output's tokens."""

    reasoning_tokens: int


class Usage(ResponseModel):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class ErrorBody(ResponseModel):
    """What went wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of every response with an error status."""

    error: ErrorBody


class Model(ResponseModel):
    """One model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(ResponseModel):
    """All models that are served: one."""

    object: str = "list"
    data: list[Model]


class Health(ResponseModel):
    """What the engine is doing: starting, ready, draining, dead; or that the server stops."""

    status: str
