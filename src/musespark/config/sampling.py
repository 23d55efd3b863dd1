"""How a request's tokens are chosen and when it ends."""

from dataclasses import dataclass

from musespark.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; names and meanings are vLLM's.

    Raises:
        RequestError: a value outside its range, naming the field.
    """

    temperature: float = 1.0
    """0 picks the most likely token; higher is more random."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0: from all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    max_tokens: int | None = None
    """Tokens to generate at most; None: until the model's length is reached."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    seed: int | None = None
    """Makes sampling reproducible; None: different every time."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many most likely ones."""

    def __post_init__(self) -> None:
        # Lists are what people write; tuples keep the object hashable and frozen.
        stop: str | tuple[str, ...] = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        if self.logprobs is not None:
            _require(0 <= self.logprobs <= 100, "logprobs", self.logprobs, "between 0 and 100")
        if self.seed is not None:
            _require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2^63 - 1")
        if any(not text for text in self.stop):
            raise RequestError("stop: a stop text must not be empty.")


def _require(holds: bool, name: str, value: float, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name}: must be {expected}, found {value}.")
