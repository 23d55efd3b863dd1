"""How a request's tokens are chosen and when it ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from musespark.errors import RequestError

# Of logit_bias and of stop_token_ids: every step goes through them.
_MAX_ENTRIES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; names and meanings are vLLM's.

    Raises:
        RequestError: a value outside its range, naming the field.
    """

    n: int = 1
    """Outputs for the same prompt, each with random numbers of its own."""
    temperature: float = 1.0
    """0 picks the most likely token; higher is more random."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0: from all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output already holds."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the output already holds it."""
    repetition_penalty: float = 1.0
    """Above 1, makes tokens of the prompt and the output less likely: it divides their positive
    logits and multiplies their negative ones."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = field(
        default=(), metadata={"flag": False}
    )
    """Added to the logits of these tokens."""
    max_tokens: int | None = None
    """Tokens to generate at most; None: until the model's length is reached."""
    min_tokens: int = 0
    """No end token, stop token or stop text counts before this many tokens."""
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
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""

    def __post_init__(self) -> None:
        # Lists are what people write; tuples keep the object hashable and frozen.
        given: object = self.stop
        stop = (given,) if isinstance(given, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple((int(k), float(v)) for k, v in bias))
        _require(1 <= self.n <= 128, "n", self.n, "between 1 and 128")
        self._check_distribution()
        self._check_lengths()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= 100, name, count, "between 0 and 100")
        if self.seed is not None:
            _require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2^63 - 1")
        if any(not text for text in self.stop):
            raise RequestError("stop: a stop text must not be empty.")

    def _check_distribution(self) -> None:
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, name, value, "between -2 and 2")
        repetition = self.repetition_penalty
        _require(0 < repetition < float("inf"), "repetition_penalty", repetition, "above 0")
        for token_id, bias in dict(self.logit_bias).items():
            _require(-100 <= bias <= 100, f"logit_bias[{token_id}]", bias, "between -100 and 100")
        for name in ("logit_bias", "stop_token_ids"):
            count = len(getattr(self, name))
            _require(count <= _MAX_ENTRIES, f"entries of {name}", count, f"at most {_MAX_ENTRIES}")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        most = self.max_tokens
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if most is not None:
            _require(
                self.min_tokens <= most,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens ({most})",
            )


def _require(holds: bool, name: str, value: float | None, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name}: must be {expected}, found {value}.")
