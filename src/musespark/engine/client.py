"""The seam between the engine and whoever serves it: requests in, token deltas out.

Whoever implements `EngineClient` may run the engine in another process, in a thread, or not at all
(a stand-in for tests). Everything here is plain data, and no text: tokenizing, stop texts and
parsing belong to the caller.

    client = launch_engine("spark-mini", EngineConfig())        # musespark.llm.serving
    await client.wait_ready()
    stream = await client.generate(EngineRequest("r1", prompt, SamplingParams(n=2)))
    async with contextlib.aclosing(stream):                     # leaving early aborts
        async for output in stream:
            ...                                                 # ends after all n have finished
    await client.shutdown(drain_seconds=10)
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import StructuredOutput
from musespark.engine.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to complete, `params.n` times."""

    request_id: str
    """The caller's name for it; must differ from those of all requests that still run."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    structured_output: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What was added to one of a request's outputs since the last delta."""

    request_id: str
    index: int
    """Which of the `n` outputs."""
    token_ids: tuple[int, ...]
    """New tokens in order, the end token included; often one. Empty only where an output ends
    without a token (an abort)."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per token of `token_ids`; None unless `params.logprobs` asks for them."""
    finish_reason: FinishReason | None = None
    """Set in the last delta of each output."""
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache; the same in every delta of a request."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per prompt token, None for the first, which nothing predicts. In the first delta
    of output 0 only, where `params.prompt_logprobs` asks for them."""


class EngineState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    """Loading weights; requests are refused."""
    READY = "ready"
    DRAINING = "draining"
    """Shutting down: what runs may finish, new requests are refused."""
    DEAD = "dead"
    """Shut down, failed to start, or died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine serves; does not change once it is ready."""

    vocab_size: int
    max_model_len: int
    """Prompt and output tokens of one request at most."""
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_full_blocks: int
    num_sliding_blocks: int
    dtype: str
    kv_cache_dtype: str
    device: str
    structured_output: bool
    """Whether grammars can be honoured: the library is installed and the model has a tokenizer."""
    layout: str = "one process"
    """How the model is spread, such as `tp2 pp2`."""
    memory_bytes: tuple[int, ...] = ()
    """What each process holds, by rank, once weights and cache are there; empty: not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What guessing ahead has brought so far. A cycle is one sequence's guess, verified."""

    cycles: int = 0
    cycle_tokens: int = 0
    """Tokens that they have added to outputs, the one that each step brings in any case included.
    """
    verified: list[int] = field(default_factory=list)
    """For each position of a guess, how many tokens were verified there."""
    accepted: list[int] = field(default_factory=list)
    """And how many of them stayed."""
    draft_seconds: float = 0.0
    """Time spent on taking in tokens and guessing."""
    saved_seconds: float = 0.0
    """Estimate: what the tokens of steps with guesses would have taken one by one, less what those
    steps took."""

    def summary(self) -> dict[str, Any]:
        """For people: tokens per cycle and acceptance by position; None where nothing is known."""
        pairs = zip(self.accepted, self.verified, strict=True)
        return {
            "cycles": self.cycles,
            "tokens_per_cycle": self.cycle_tokens / self.cycles if self.cycles else None,
            "acceptance": [stayed / tried if tried else None for stayed, tried in pairs],
            "draft_seconds": self.draft_seconds,
            "saved_seconds": self.saved_seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot between two steps. `num_*` of the first group are now, the rest only grow."""

    num_running: int = 0
    """Outputs in the batch; a request with n = 4 counts four times."""
    num_waiting: int = 0
    num_full_blocks_used: int = 0
    """Held by requests. Blocks that only the prefix cache remembers count as free."""
    num_sliding_blocks_used: int = 0
    kv_cache_usage: float = 0.0
    """Share of the fuller of the two pools that requests hold, 0 to 1."""

    prompt_tokens: int = 0
    """Prompt tokens of all requests that have run, cached ones included."""
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Those of them that were found."""
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Outputs that have ended, by finish reason."""
    steps: int = 0
    step_seconds: float = 0.0
    """Time spent in steps, all together; its growth per second is how busy the engine is."""
    expert_load: dict[int, list[int]] = field(default_factory=dict)
    """Layer -> how often each of its experts was chosen by this process's tokens; empty unless it
    is counted."""
    schedule_seconds: float = 0.0
    """The share of it that went to scheduling, building inputs and bookkeeping, and not to the
    model and to sampling."""
    speculation: SpeculationStats | None = None
    """None without a draft."""

    def following(self, earlier: "EngineStats") -> "EngineStats":
        """This snapshot, with what an engine tells only now and then taken from an earlier one."""
        if self.expert_load:
            return self
        return replace(self, expert_load=earlier.expert_load)


class OutputStream(Protocol):
    """The deltas of one request; an async generator will do.

    Iterating raises EngineDeadError if the engine dies before the request has finished.
    """

    def __aiter__(self) -> "OutputStream": ...

    async def __anext__(self) -> EngineOutput: ...

    async def aclose(self) -> None:
        """Stop early: the request is aborted and its blocks are free by the next step."""
        ...


class EngineClient(Protocol):
    """A running engine, as seen from one asyncio loop.

    A slow reader holds up nobody: deltas that it has not fetched yet are joined, so that what
    waits for it is bounded by the length of its own output.
    """

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life, known at once when it dies."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether requests would be accepted now: the state is READY."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What is served.

        Raises:
            EngineNotReadyError: before `wait_ready` has returned.
        """
        ...

    async def wait_ready(self) -> None:
        """Return once the model is loaded.

        Raises:
            MuseSparkError: loading failed; the same error the loader raised, where it is ours.
            EngineDeadError: the engine ended for another reason.
        """
        ...

    async def generate(self, request: EngineRequest) -> OutputStream:
        """Queue a request; what it produces comes from the stream.

        Returns once the engine has accepted the request, so that a server can still answer with
        an error status.

        Raises:
            RequestError: the request can never be honoured (too long, a bad grammar, ...).
            QueueFullError: `max_queue_len` requests wait already; try again later.
            EngineNotReadyError: the engine is still starting, or shutting down.
            EngineDeadError: the engine has died.
        """
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its outputs (one whose stop text was found).

        The stream gets a last delta with finish reason ABORT for each output that still ran. A
        request that is unknown or finished is none of anybody's business: nothing happens.
        """
        ...

    def stats(self) -> EngineStats:
        """The newest snapshot; never waits for a step."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        ...

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for up to `drain_seconds`, abort the rest,
        and end the engine. Returns when it is gone; calling it twice is harmless."""
        ...
