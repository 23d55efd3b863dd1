"""What the keys of a Muse Spark checkpoint mean: the one place that knows.

Verified against transformers 5.23 and published files, each with the symptom when it is got wrong:

- Prefix. `MuseSparkForConditionalGeneration` writes the decoder under `model.language_model.`; a
  `MuseSparkTextModel` saved alone writes it bare; a text model wrapped with a head writes
  `model.`. `lm_head.weight` has no prefix in any of them, and a text model saved alone has no head
  at all. Wrong: every tensor is reported missing.
- Norm weights are centred: `input_layernorm`, `pre_feedforward_layernorm` and
  `pre_expert_norm` multiply by 1 + w after the norm; `post_feedforward_layernorm` and
  `post_expert_norm` multiply by 1 + w before it; only the final `norm` multiplies by w. Wrong:
  fluent-looking noise, since the stored weights are near 0 where 1 is meant.
- The embedding norm, QK-norm, attention output norm and post-attention norm have no weight and so
  no key. Lost on some loading path: one token repeated for ever.
- `q_proj` and `k_proj` rows are stored per head as [first halves | second halves] (rotate-half
  order), on every layer, RoPE or not. Read as interleaved pairs: right at position 0, then drift.
- `experts.gate_up_proj` is [E, 2I, H], the gate rows first, then the up rows, not interleaved.
  Swapped: SiLU on the wrong half, plausible magnitudes, wrong text.
- Files in the wild also hold experts one by one, `experts.{e}.{gate,up,down}_proj.weight` with
  shapes [I, H], [I, H], [H, I]. A container of experts asks which form is there (see `has` of
  `weight_slots`) and lists slots for that one.
- `post_*_residual_gate.gate`, `mlp.gate.weight` and `mlp.gate.e_score_correction_bias` are float32
  and stay float32. Rounded to bfloat16: experts flip on near ties. (A model that was cast as a
  whole before it was saved stores them in bfloat16; that is what its author got, so it is loaded.)
- `e_score_correction_bias` chooses experts and never weighs them. Added to the weights: slightly
  wrong everywhere.
- NVFP4 experts store two e2m1 codes per byte along the input dimension, the low nibble first, with
  `*_weight_scale` (e4m3, per 16 inputs) and `*_weight_scale_2` (float32; gate and up apart).
- Vision and audio towers, their adapters and projections belong to no text decoder; `rotary_emb.*`
  is a table that is computed; `self_attn.{q,k,v}_scale` calibrate another engine's FP8 cache, and
  this model's query scale stands in config.json. All of these are skipped by name; any other key
  that no module asks for is an error.
"""

import re

from musespark.checkpoint.shards import CheckpointReader
from musespark.errors import CheckpointError

LM_HEAD = "lm_head.weight"
"""The output projection: never prefixed."""

CONDITIONAL_GENERATION_PREFIX = "model.language_model."
TEXT_MODEL_PREFIX = ""

# Known layouts, and a tensor that each has.
_PREFIXES = (CONDITIONAL_GENERATION_PREFIX, "model.", TEXT_MODEL_PREFIX)
_MARKER = "embed_tokens.weight"

_SKIPPED = re.compile(
    r"""
    (model\.)?(vision_tower|vision_adapter|vision_projection|audio_tower)\..*
    | (.*\.)?self_attn\.[qkv]_scale
    | (.*\.)?rotary_emb\..*
    """,
    re.VERBOSE,
)


def find_prefix(reader: CheckpointReader) -> str:
    """The prefix of the decoder's keys in this checkpoint: `model.language_model.`, ... or none.

    Raises:
        CheckpointError: no decoder in the files, or more than one.
    """
    found = [prefix for prefix in _PREFIXES if f"{prefix}{_MARKER}" in reader]
    if len(found) == 1:
        return found[0]
    keys = [f"{prefix}{_MARKER}" for prefix in found or _PREFIXES]
    if found:
        raise CheckpointError(
            f"{reader.folder}: holds more than one decoder: {', '.join(keys)}. "
            "Keep one model per folder."
        )
    examples = ", ".join(reader.names()[:3])
    raise CheckpointError(
        f"{reader.folder}: no Muse Spark decoder in these files: none of {', '.join(keys)} is "
        f"there. The first of its {len(reader)} tensors: {examples or 'none'}."
    )


def is_skipped(name: str) -> bool:
    """Whether a text engine leaves this key of the checkpoint unread, knowingly."""
    return _SKIPPED.fullmatch(name) is not None


def is_skipped_of_draft(name: str) -> bool:
    """Whether this key of a DSpark draft's checkpoint is left unread, knowingly: the inverse of
    d2t, and copies of the target's own embeddings."""
    return re.fullmatch(r"t2d|embed_tokens\.weight|mask_embedding(\.weight)?", name) is not None
