"""Everything that decides what Spark-Mini is and how it is trained, in one place."""

from dataclasses import dataclass

FULL_ATTENTION_EVERY = 4


@dataclass(frozen=True)
class Shape:
    """The model. Names are the checkpoint's config.json's."""

    vocab_size: int = 384
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    moe_hidden_size: int = 128
    moe_intermediate_size: int = 96
    num_local_experts: int = 16
    num_experts_per_tok: int = 4
    sliding_window: int = 64
    rope_theta: float = 10_000.0
    qk_scale_factor: float = 5.4730064863875
    output_multiplier: float = 0.5  # 1 / sqrt(hidden_size / 64)
    final_logit_softcapping: float = 20.0
    residual_gate_temperature: float = 0.3
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    max_position_embeddings: int = 4096

    def is_full(self, layer: int) -> bool:
        """Whether a layer sees everything, without RoPE: every fourth, counted from the last."""
        return (self.num_hidden_layers - 1 - layer) % FULL_ATTENTION_EVERY == 0


@dataclass(frozen=True)
class Schedule:
    """What every training has: how long, how fast, and how the rate rises and falls."""

    seed: int
    steps: int
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float  # on matrices only
    clip: float
    warmup_steps: int
    decay_share: float  # the last part of the training, over which the rate falls to zero

    def rate(self, step: int) -> float:
        """Return the learning rate at a step, as a share of its maximum."""
        warm = (step + 1) / self.warmup_steps
        left = (self.steps - step) / (self.steps * self.decay_share)
        return min(1.0, warm, left)


@dataclass(frozen=True)
class Recipe(Schedule):
    """The training. One step is `rows` x `row_tokens` tokens."""

    seed: int = 0
    steps: int = 16_816
    rows: int = 77
    row_tokens: int = 640
    steps_per_chunk: int = 16  # data is made, and checkpoints are taken, in chunks of steps

    learning_rate: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup_steps: int = 200
    decay_share: float = 0.6
    balance_rate: float = 1e-3  # of the correction bias, scaled with the learning rate
    residual_gate_init: float = -0.25  # mixes in 0.30 of each branch


SPARK_MINI = Shape()
RECIPE = Recipe()
