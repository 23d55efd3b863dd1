"""What the endpoints of one server share."""

import time
import uuid
from dataclasses import dataclass, field

from musespark.chat.format import ChatFormat
from musespark.chat.tokenizer import Tokenizer
from musespark.config.sampling_defaults import SamplingDefaults
from musespark.config.server import ServerConfig
from musespark.config.structured_output import AnswerScope
from musespark.engine.client import EngineClient
from musespark.errors import RequestError
from musespark.llm.answer_scope import answer_scope
from musespark.server.errors import ApiError
from musespark.server.logprobs import TokenTexts
from musespark.server.metrics import Metrics
from musespark.server.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Context:
    """One model, being served."""

    config: ServerConfig
    model_name: str
    """The model's name in the API."""
    chat: ChatFormat
    defaults: SamplingDefaults
    supervisor: Supervisor
    metrics: Metrics
    texts: TokenTexts
    scope: AnswerScope
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def build(
        cls,
        config: ServerConfig,
        model_name: str,
        chat: ChatFormat,
        supervisor: Supervisor,
        defaults: SamplingDefaults | None = None,
    ) -> "Context":
        """A context from its parts."""
        metrics = Metrics(lambda: supervisor.current)
        supervisor.on_restart = metrics.engine_restarts.inc
        return cls(
            config=config,
            model_name=config.served_model_name or model_name,
            chat=chat,
            defaults=defaults or SamplingDefaults(),
            supervisor=supervisor,
            metrics=metrics,
            texts=TokenTexts(chat.tokenizer),
            scope=answer_scope(chat),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self.chat.tokenizer

    @property
    def engine(self) -> EngineClient:
        """The engine of the moment.

        Raises:
            EngineError: there is none that takes requests.
        """
        return self.supervisor.require()

    def check_model(self, name: str | None) -> None:
        """A request may name the model that is served, or none.

        Raises:
            ApiError: it names another one.
        """
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"The model {name!r} is not served here. There is: {self.model_name}.",
                param="model",
                code="model_not_found",
            )

    def check_length(self, num_tokens: int, max_model_len: int, field_name: str) -> None:
        """A prompt must leave room for one token at least.

        Raises:
            ApiError: it does not.
        """
        if num_tokens >= max_model_len:
            raise ApiError(
                400,
                f"{field_name}: the prompt has {num_tokens} tokens, but prompt and output together "
                f"may have {max_model_len}. Shorten it.",
                param=field_name,
                code="context_length_exceeded",
            )

    def check_choices(self, count: int) -> None:
        """One request may ask for so many outputs and no more.

        Raises:
            RequestError: it asks for more.
        """
        if count > self.config.max_choices:
            raise RequestError(
                f"n: {count} outputs were asked for, counting every prompt; one request may have "
                f"{self.config.max_choices}."
            )


def new_id(kind: str) -> str:
    """A name for a response, also the engine's name for its request."""
    return f"{kind}-{uuid.uuid4().hex}"
