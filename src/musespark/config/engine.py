"""Settings of the serving engine; names are vLLM's."""

from dataclasses import dataclass

from musespark.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How many requests run together, and on how much memory.

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

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be 1 or more, found {value}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization: must be above 0 and at most 1, "
                f"found {self.gpu_memory_utilization}."
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) exceeds max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request needs a token per step. "
                "Lower the first or raise the second."
            )
