"""One request as the engine sees it: tokens in, tokens out, blocks held meanwhile."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from musespark.config.sampling import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended; values are the OpenAI API's where it has one."""

    STOP = "stop"
    """An end token, a stop token, or a stop text."""
    LENGTH = "length"
    """max_tokens, or the model's length."""
    ABORT = "abort"
    """The caller gave up on it."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position."""

    logprob: float
    """Of the token that was chosen."""
    rank: int
    """Of that token among all, 1 for the most likely."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and theirs, in descending order."""


class TokenConstraint(Protocol):
    """What one output may still become; see grammar.Constraint."""

    is_finished: bool
    is_too_slow: bool

    def fill_allowed(self, bitmask: Any, row: int, ahead: Sequence[int] = ()) -> list[int]: ...

    def accept(self, token_id: int) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its settings, and how far one of its outputs has come."""

    request_id: int
    """Shared by all outputs of one prompt."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    end_token_ids: frozenset[int]
    """Tokens that end the output: the model's, unless ignored, and the request's own."""
    max_total_tokens: int
    """Prompt and output tokens at most."""
    max_output_tokens: int = field(init=False)
    """Output tokens at most."""
    index: int = 0
    """Which of the prompt's outputs."""
    output_token_ids: list[int] = field(default_factory=list)
    """The last one is -1 - k while it is not known yet, but going to be what row k of the step
    under way samples."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    draft_token_ids: list[int] = field(default_factory=list)
    """What a draft guesses to follow the last token; only while it decodes."""
    draft_survival: list[float] = field(default_factory=list)
    """One per guessed token: how likely it is that it and all before it are accepted."""
    full_blocks: list[int] = field(default_factory=list)
    """Blocks of the full layers' pool, from position 0."""
    sliding_blocks: list[int] = field(default_factory=list)
    """Blocks of the sliding layers' pool, from block number `first_sliding_block`."""
    first_sliding_block: int = 0
    num_blocks: int = 0
    """Number of the first block that it does not hold yet."""
    num_named_blocks: int = 0
    """Number of the first block whose content the prefix cache has not been told."""
    num_waiting_tokens: int = 0
    """Of its computed tokens, the last ones, which the draft will take in later. A block with such
    tokens has no name yet: whoever found it would find it unfinished."""
    block_keys: list[bytes] = field(default_factory=list)
    """The prefix cache's names of its blocks, as far as they are known."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None before it first runs."""
    slot: int = -1
    """Its place among those that run, below max_num_seqs; -1 while it does not run."""
    is_under_way: bool = False
    """Part of a step that must come back before it can be part of another."""
    needs_each_token: bool = False
    """Whether the host must know each of its tokens before the next one can be sampled."""
    num_starts: int = 0
    """How many times it has got blocks: more than once if it was preempted."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One per prompt token, as far as they are known and if they are wanted."""
    random_key: int | None = None
    """Where its random numbers begin; None before its first token."""
    constraint: TokenConstraint | None = None
    """What its output must follow."""
    followers: list["Request"] = field(default_factory=list)
    """Further outputs of the same prompt, which wait for it to be in the cache."""

    def __post_init__(self) -> None:
        room = self.max_total_tokens - len(self.prompt_token_ids)
        limit = self.params.max_tokens
        self.max_output_tokens = room if limit is None else min(room, limit)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to be run; 1 while decoding."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that its output may still get."""
        return self.max_output_tokens - len(self.output_token_ids)

    def drop_drafts(self) -> None:
        """Forget what was guessed."""
        self.draft_token_ids, self.draft_survival = [], []

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Prompt and output tokens at positions start to stop - 1."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        head = list(self.prompt_token_ids[start:stop])
        return head + self.output_token_ids[: max(0, stop - prompt)]
