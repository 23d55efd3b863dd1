"""Settings of the serving engine; names are vLLM's."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError

KV_CACHE_DTYPES = ("auto", "bf16", "fp8_e4m3")
DRAFT_SAMPLING = ("greedy", "probabilistic")
DRAFT_VERIFICATION = ("block", "token")
ExecutorKind = Literal["multiprocess", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Parallelism):
    """How many requests run together, on how much memory, and over which processes.

    Raises:
        ConfigError: a value outside its range, naming the setting.
    """

    max_model_len: int | None = None
    """Prompt and output tokens of one request at most; None: what the model was made for, or what
    fits into memory."""
    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step; longer prompts are read in chunks of this size."""
    block_size: int = 16
    """Tokens per block of the KV cache."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's free memory, after loading, that the KV cache may take."""
    kv_cache_dtype: str = "auto"
    """How keys and values are stored: auto (as the model computes), bf16, or fp8_e4m3 (half the
    memory of bf16, less exact)."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of past prompts for prompts that begin alike."""
    batch_invariant: bool = False
    """Make a request's tokens the same bits whoever shares its batch, on one device. Sequences run
    one by one then, so a full batch takes as long as its sequences one after the other."""
    draft: str = "none"
    """DSpark draft that guesses tokens ahead, which the model then verifies in one step: a folder,
    a packaged draft's name, a Hugging Face repository id, auto (the one that comes with the model,
    if any), or none. It changes no answer, only the speed."""
    num_speculative_tokens: int | None = None
    """Tokens to guess and verify in every step; None: as many as pay by measured times, up to the
    draft's block size, and none where the batch is large."""
    draft_sampling: str = "greedy"
    """How tokens are guessed for requests with a temperature: probabilistic (drawn at random, as
    their own tokens are) or greedy (the most likely ones)."""
    draft_verification: str = "block"
    """How guesses drawn at random are verified for requests without a seed: block (all together,
    keeps more) or token (one by one)."""
    num_threads: int | None = None
    """Threads that compute on a CPU, shared out among the processes; None: one per core. On a
    machine that does other work too, one fewer than its cores can be several times faster, since
    threads wait for one another."""
    expert_load_metrics: bool = False
    """Count how often each expert is chosen, for /metrics; one more small operation per layer."""
    max_queue_len: int = 1024
    """Requests that may wait beside those that run; further ones are refused."""
    warms_up: bool = field(default=False, metadata={"flag": False})
    """Where steps are recorded as CUDA graphs: record all sizes of small steps, and run some large
    ones, before the first request, so that none waits for that or for a compiler. For servers; what
    runs once and ends sets up what it needs."""
    executor: ExecutorKind = "multiprocess"
    """What starts the processes that share a model: multiprocess (on this machine) or ray (on a Ray
    cluster, which may be many machines)."""

    def __post_init__(self) -> None:
        Parallelism.__post_init__(self)
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "num_speculative_tokens",
            "num_threads",
            "max_queue_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be 1 or more, found {value}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization: must be above 0 and at most 1, "
                f"found {self.gpu_memory_utilization}."
            )
        if self.batch_invariant and self.fixed_chunk < self.block_size:
            raise ConfigError(
                f"batch_invariant: max_num_batched_tokens ({self.max_num_batched_tokens}) must "
                f"exceed max_num_seqs ({self.max_num_seqs}) by a block of {self.block_size} at "
                "least. Raise the first or lower the second."
            )
        for name, choices in (
            ("executor", get_args(ExecutorKind)),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("draft_sampling", DRAFT_SAMPLING),
            ("draft_verification", DRAFT_VERIFICATION),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name}: must be one of {', '.join(choices)}, found {value!r}.")
        self._check_draft()
        if self.batch_invariant and self.shares_experts_over_replicas:
            raise ConfigError(
                "batch_invariant: replicas that share experts compute the rows of all their "
                "requests together. Leave expert_parallel out, or set data_parallel_size to 1."
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) exceeds max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request needs a token per step. "
                "Lower the first or raise the second."
            )

    def _check_draft(self) -> None:
        if not self.draft:
            raise ConfigError("draft: must be a model, auto, or none, found nothing.")
        if self.draft == "none" and self.num_speculative_tokens is not None:
            raise ConfigError(
                "num_speculative_tokens: there is nothing to guess tokens with. Set draft as well."
            )
        if self.draft != "none" and self.batch_invariant:
            raise ConfigError(
                "draft: cannot be combined with batch_invariant: a token verified beside guesses "
                "is computed in other shapes, so in other bits, than one on its own. Leave one of "
                "them out."
            )

    @property
    def fixed_chunk(self) -> int:
        """Prompt tokens of a step where `batch_invariant` fixes them: what fits beside one token
        of every other request, in whole blocks."""
        room = min(self.max_num_batched_tokens - self.max_num_seqs, 256)
        return room // self.block_size * self.block_size
