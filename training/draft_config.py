"""Everything that decides what Spark-Mini's draft is and how it is trained, in one place."""

from dataclasses import dataclass

from training.config import SPARK_MINI, Schedule


@dataclass(frozen=True)
class DraftShape:
    """The draft. Names are its config.json's, where it has them."""

    hidden_size: int = SPARK_MINI.hidden_size  # tokens are embedded by the target's table
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    ffn_dim_multiplier: float = 2.5
    rms_norm_eps: float = 1e-5
    rms_post_norm_eps: float = 1e-8
    rope_theta: float = 10_000.0
    window: int = 512  # reaches over most conversations, since much of a reply is copied
    qk_scale: float = 3.87
    base_width: int = 64  # logits are multiplied by (hidden_size / base_width)^-0.5
    output_soft_cap_temp: float = 20.0
    target_layer_ids: tuple[int, ...] = (1, 3, 5, 7)
    mask_token_id: int = 260  # <|pad|>, which no conversation holds
    block_size: int = 7
    markov_rank: int = 64

    @property
    def output_multiplier(self) -> float:
        """Return what logits are multiplied by."""
        return (self.hidden_size / self.base_width) ** -0.5


@dataclass(frozen=True)
class DraftRecipe(Schedule):
    """The training. One step is `rows` x `anchors` blocks."""

    seed: int = 1
    steps: int = 4_000
    rows: int = 8  # conversations a step, of about the same length
    max_tokens: int = 512  # longer conversations are left out
    anchors: int = 24  # blocks a conversation, begun at random tokens of the assistant's
    chunk: int = 32  # conversations that are made, and read by the target, at a time
    steps_per_chunk: int = 16  # so that each serves four times, with other anchors
    pool_chunks: int = 16  # the last ones read, among which steps draw

    own_conversations: int = 1_024  # that the target continues itself
    own_tokens: int = 256  # at most, a reply
    own_sampled: float = 0.5  # share of them drawn at temperature 1, the others greedily
    own_share: float = 0.4  # of the steps

    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup_steps: int = 100
    decay_share: float = 0.7
    residual_gate_init: float = -0.25

    place_decay: float = (
        4.0  # a block's place i counts exp(-i / this): later ones are seldom needed
    )
    total_variation: float = 1.0  # weight of this loss beside the cross-entropy
    confidence: float = 0.1


SPARK_MINI_DRAFT = DraftShape()
DRAFT_RECIPE = DraftRecipe()
