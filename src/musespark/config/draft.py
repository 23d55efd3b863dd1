"""What a DSpark draft is made of, read from its config.json, and which target it belongs to.

A draft is a small decoder that proposes the next few tokens of a larger one, its target, from the
target's own hidden states (docs/speculative.md). Every switch that changes what it computes must
be stated; only what is a matter of course has a default.
"""

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from musespark.config.model import IRRELEVANT_FIELDS, DecoderConfig
from musespark.config.strict import FieldReader, read_json_object
from musespark.errors import ConfigError

MODEL_TYPE = "muse_spark_dspark"

GainCenter = Literal["one", "zero", "inverse_residual_index"]
ResidualDtype = Literal["bf16", "fp32"]

# What multiplies normed queries: in no config file, fixed by the published implementation.
_SQRT_SCALING = 3.87
_PLAIN_SCALING = 43.7840518911

# Of the reference's own bookkeeping: its tables of angles, its derived positions.
_IRRELEVANT_HERE = ("max_position_embeddings", "rope_use_fp32_in_outer_product")


@dataclass(frozen=True, slots=True)
class DraftLayerConfig:
    """What differs from layer to layer of a draft."""

    rope_theta: float
    """Base of the rotary angles; 0 means no rotary embedding on this layer."""
    sliding_window: int | None
    """Keys a query sees, its own included; None: all."""
    tunes_temperature: bool
    """Whether queries grow with the logarithm of their position."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A DSpark draft. Field names are config.json's, where it has one."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """int(ffn_dim_multiplier * hidden_size)."""
    layers: tuple[DraftLayerConfig, ...]
    rms_norm_eps: float
    rms_post_norm_eps: float
    norm_affine: bool
    post_norm_affine: bool
    norm_zero_centered_gamma: bool
    post_norm_gain_center_type: GainCenter
    output_norm_gain_center_type: GainCenter
    use_qk_norm: bool
    use_attn_o_norm: bool
    use_attn_o_gate: bool
    use_residual_gate: bool
    use_ffn_learnable_scales: bool
    residual_dtype: ResidualDtype
    use_sqrt_attn_scaling: bool
    target_layer_ids: tuple[int, ...]
    """Ascending: k is the target's stream behind layer k, -1 behind its embedding norm."""
    target_hidden_size: int
    mask_token_id: int
    block_size: int
    markov_rank: int
    """0: no Markov head."""
    draft_vocab_size: int
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    attn_temperature_tuning_floor_scale: float | None = None
    attn_temperature_tuning_q_scale_constant: float | None = None
    output_multiplier: float = 1.0
    """Of the logits, from `metap`."""
    output_soft_cap_temp: float | None = None
    sample_from_anchor: bool = True
    """Whether the anchor's row proposes the first token; else the first mask's row does."""
    causal: bool = True
    """Whether a block's rows see only those before them in the block; else all of the block."""
    vocab_size: int | None = None
    """The target's vocabulary, where the file states it."""

    @property
    def attention_scale(self) -> float:
        """Softmax scale: 1/sqrt(head_dim), times the query scale where queries are normed."""
        scale = 1 / math.sqrt(self.head_dim)
        if not self.use_qk_norm:
            return scale
        return scale * (_SQRT_SCALING if self.use_sqrt_attn_scaling else _PLAIN_SCALING * scale)

    @property
    def max_tokens(self) -> int:
        """How many tokens one block can propose."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def gain_center(self, residual_index: int) -> float:
        """What is added to the weight of the norm after a sub-layer.

        Args:
            residual_index: of the sub-layer, counted from 1 through attention and feed-forward.
        """
        if not self.norm_zero_centered_gamma:
            return 0.0
        kind = self.post_norm_gain_center_type
        return {"one": 1.0, "zero": 0.0, "inverse_residual_index": 1 / residual_index}[kind]

    @property
    def pre_norm_center(self) -> float:
        """What is added to the weight of the norms before sub-layers."""
        return 1.0 if self.norm_zero_centered_gamma else 0.0

    @property
    def output_norm_center(self) -> float:
        """What is added to the weight of the last norm."""
        centered = self.norm_zero_centered_gamma and self.output_norm_gain_center_type == "one"
        return 1.0 if centered else 0.0

    @classmethod
    def from_folder(cls, folder: Path) -> "DraftConfig":
        """Read `folder`/config.json.

        Raises:
            ConfigError: names the file and the field that is missing, misspelt or unsupported.
        """
        path = folder / "config.json"
        return cls.from_dict(read_json_object(path), where=str(path))

    @classmethod
    def from_dict(cls, fields: dict[str, Any], where: str = "config.json") -> "DraftConfig":
        """Build from the JSON object of a draft's config.json.

        Raises:
            ConfigError: names the field that is missing, misspelt or unsupported.
        """
        if (model_type := fields.get("model_type")) != MODEL_TYPE:
            raise ConfigError(
                f"{where}: model_type: a draft's must be {MODEL_TYPE!r}, found {model_type!r}. "
                "Give the folder of a DSpark draft."
            )
        reader = FieldReader(fields, where)
        config = cls(
            **_read_sizes(reader),
            **_read_switches(reader),
            **_read_temperature(reader),
            **_read_proposing(reader),
            layers=(),
            output_multiplier=_read_multiplier(reader),
            output_soft_cap_temp=reader.take_positive("output_soft_cap_temp", float, None),
        )
        config = dataclasses.replace(config, layers=_read_layers(reader, config))
        _refuse_experts(reader)
        reader.ignore(*IRRELEVANT_FIELDS, *_IRRELEVANT_HERE, "bos_token_id", "eos_token_id")
        reader.ignore("tie_word_embeddings")
        reader.finish()
        _check(config, reader)
        return config

    def check_target(self, target: DecoderConfig) -> None:
        """Refuse a target that this draft was not made for.

        Raises:
            ConfigError: every size that differs, and the settings to change.
        """
        last = target.num_hidden_layers - 1
        problems = []
        if self.target_hidden_size != target.hidden_size:
            problems.append(
                f"target_hidden_size is {self.target_hidden_size}, but the target's hidden_size "
                f"is {target.hidden_size}"
            )
        if self.hidden_size != target.hidden_size:
            problems.append(
                f"hidden_size is {self.hidden_size}, but tokens are embedded by the target's "
                f"table, {target.hidden_size} wide"
            )
        if self.target_layer_ids[-1] > last:
            problems.append(
                f"target_layer_ids has layer {self.target_layer_ids[-1]}, but the target's last "
                f"layer is {last}"
            )
        if self.vocab_size not in (None, target.vocab_size):
            problems.append(
                f"vocab_size is {self.vocab_size}, but the target's is {target.vocab_size}"
            )
        if self.draft_vocab_size > target.vocab_size:
            problems.append(
                f"draft_vocab_size is {self.draft_vocab_size}, but the target has no more than "
                f"{target.vocab_size} tokens"
            )
        if self.mask_token_id >= target.vocab_size:
            problems.append(
                f"mask_token_id is {self.mask_token_id}, but the target's vocabulary ends at "
                f"{target.vocab_size - 1}"
            )
        problems += self._unpageable(target)
        if problems:
            raise ConfigError(
                f"draft: made for another target: {'; '.join(problems)}. Set `draft` to one that "
                "was trained for this model, or leave it out."
            )

    def _unpageable(self, target: DecoderConfig) -> list[str]:
        """Layers that see further back than the target keeps anything."""
        if any(layer.attention == "full_attention" for layer in target.layers):
            return []
        far = [
            index
            for index, layer in enumerate(self.layers)
            if layer.sliding_window is None or layer.sliding_window > target.sliding_window
        ]
        return [
            f"layer {index} of the draft sees further back than the target's sliding_window of "
            f"{target.sliding_window}, and the target has no full layers"
            for index in far[:1]
        ]

    def check_num_tokens(self, num_tokens: int) -> None:
        """Refuse to propose more tokens at a time than the draft was trained for.

        Raises:
            ConfigError: names the setting and its largest value.
        """
        if not 1 <= num_tokens <= self.max_tokens:
            raise ConfigError(
                f"num_speculative_tokens: must be from 1 to {self.max_tokens} with this draft "
                f"(block_size {self.block_size}), found {num_tokens}."
            )


def _read_sizes(reader: FieldReader) -> dict[str, Any]:
    hidden = reader.take_positive("hidden_size")
    width = int(reader.take_positive("ffn_dim_multiplier", float) * hidden)
    # Derived, but files may repeat it.
    if (stated := reader.take("intermediate_size_mlp", int, width)) != width:
        raise reader.error(
            "intermediate_size_mlp", f"ffn_dim_multiplier makes it {width}, found {stated}."
        )
    eps = reader.take_positive("rms_norm_eps", float)
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: reader.take_positive(name) for name in names} | {
        "hidden_size": hidden,
        "intermediate_size": width,
        "rms_norm_eps": eps,
        "rms_post_norm_eps": reader.take_positive("rms_post_norm_eps", float, eps),
    }


def _read_switches(reader: FieldReader) -> dict[str, Any]:
    switches = (
        "norm_affine", "post_norm_affine", "norm_zero_centered_gamma", "use_qk_norm",
        "use_attn_o_norm", "use_attn_o_gate", "use_residual_gate", "use_ffn_learnable_scales",
        "use_sqrt_attn_scaling",
    )  # fmt: skip
    return {name: reader.take(name, bool) for name in switches} | {
        "post_norm_gain_center_type": reader.take_choice(
            "post_norm_gain_center_type", ("one", "zero", "inverse_residual_index")
        ),
        # The last norm follows no sub-layer whose index could be inverted.
        "output_norm_gain_center_type": reader.take_choice(
            "output_norm_gain_center_type", ("one", "zero")
        ),
        "residual_dtype": reader.take_choice("residual_dtype", ("bf16", "fp32")),
    }


def _read_temperature(reader: FieldReader) -> dict[str, Any]:
    """Both numbers, or neither: they do nothing alone, nor on no layers."""
    names = ("attn_temperature_tuning_floor_scale", "attn_temperature_tuning_q_scale_constant")
    numbers = {
        names[0]: reader.take_positive(names[0], float, None),
        names[1]: reader.take(names[1], float, None),
    }
    layers = reader.take_choice("attn_temperature_tuning_layers", ("global", "none"), "none")
    return numbers if layers == "global" and None not in numbers.values() else {}


def _read_proposing(reader: FieldReader) -> dict[str, Any]:
    ids = reader.take("target_layer_ids", list)
    if not ids or not all(isinstance(k, int) and not isinstance(k, bool) for k in ids):
        raise reader.error("target_layer_ids", f"must be a list of layer numbers, found {ids!r}.")
    if ids[0] < -1 or any(later <= former for former, later in pairwise(ids)):
        raise reader.error("target_layer_ids", f"must ascend, from -1 on, found {ids!r}.")
    for name in ("mask_token_id", "markov_rank"):
        if (value := reader.take(name, int)) < 0:
            raise reader.error(name, f"must not be negative, found {value}.")
    return {
        "target_layer_ids": tuple(ids),
        "target_hidden_size": reader.take_positive("target_hidden_size"),
        "mask_token_id": reader.take("mask_token_id", int),
        "markov_rank": reader.take("markov_rank", int),
        "block_size": reader.take_positive("block_size"),
        "draft_vocab_size": reader.take_positive("draft_vocab_size"),
        "enable_confidence_head": reader.take("enable_confidence_head", bool),
        "confidence_head_with_markov": reader.take("confidence_head_with_markov", bool, False),
        "sample_from_anchor": reader.take("sample_from_anchor", bool, True),
        "causal": reader.take("causal", bool, True),
        "vocab_size": reader.take_positive("vocab_size", int, None),
    }


def _read_multiplier(reader: FieldReader) -> float:
    """What the logits are multiplied by: by how much wider the draft is than where its learning
    rates were tuned, to the power of -1 (mup) or -1/2 (sp)."""
    metap = FieldReader(reader.take("metap", dict, {}), f"{reader.where}: metap")
    mode = metap.take_choice("metap_mode", ("mup", "sp"), "sp")
    base_width = metap.take_positive("base_width", float, None)
    uses = metap.take("use_metap", bool, False)
    metap.ignore("router_has_one_inf_dim")  # of experts, which a draft has none of
    metap.finish()
    if not uses:
        return 1.0
    if base_width is None:
        raise metap.missing("base_width")
    ratio = reader.take_positive("hidden_size") / base_width
    return float(ratio ** (-1.0 if mode == "mup" else -0.5))


def _read_layers(reader: FieldReader, config: DraftConfig) -> tuple[DraftLayerConfig, ...]:
    """RoPE and window of each layer. Both patterns end at the last layer."""
    count = config.num_hidden_layers
    is_rotary = _reads_rotary(reader)
    theta = reader.take_positive("rope_theta", float, *(() if is_rotary else (None,)))
    cycle = reader.take_positive("every_n_layers_nope", int, None)
    windows = _read_windows(reader)
    tunes = config.attn_temperature_tuning_floor_scale is not None
    layers = []
    for index in range(count):
        left = count - 1 - index
        rotates = is_rotary and (cycle is None or left % cycle != 0)
        # Counted so that the last layer of the draft is the last of a cycle of `cycle` layers.
        place = index if cycle is None else index + cycle - count % cycle
        window = windows[place % len(windows)] or None
        layers.append(
            DraftLayerConfig(
                rope_theta=theta if rotates else 0.0,
                sliding_window=window,
                tunes_temperature=tunes and window is None,
            )
        )
    return tuple(layers)


def _reads_rotary(reader: FieldReader) -> bool:
    """`use_rope`, `draft_position_mode`, or both where they agree."""
    mode = reader.take_choice("draft_position_mode", ("rope", "nope"), None)
    if mode is None:
        return cast("bool", reader.take("use_rope", bool))
    is_rotary = mode == "rope"
    if reader.take("use_rope", bool, is_rotary) != is_rotary:
        raise reader.error("draft_position_mode", f"is {mode!r}, but use_rope says otherwise.")
    return is_rotary


def _read_windows(reader: FieldReader) -> list[int]:
    windows: list[int] = reader.take("global_attn_cfg", list, [0])
    for place, window in enumerate(windows):
        if not isinstance(window, int) or isinstance(window, bool) or window < 0:
            raise reader.error(
                f"global_attn_cfg[{place}]",
                f"must be a window in tokens, or 0 for all of them, found {window!r}.",
            )
    return windows or [0]


def _refuse_experts(reader: FieldReader) -> None:
    experts = reader.take("moe", dict, {})
    if experts.get("is_enabled", False):
        raise reader.error("moe", "a draft with experts is not supported, only a dense one.")


def _check(config: DraftConfig, reader: FieldReader) -> None:
    """Sizes and switches that must fit one another."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise reader.error(
            "num_key_value_heads",
            f"num_attention_heads ({config.num_attention_heads}) must be a multiple of it, "
            f"found {config.num_key_value_heads}.",
        )
    if config.head_dim % 2:
        raise reader.error("head_dim", f"must be even for RoPE, found {config.head_dim}.")
    if config.intermediate_size < 1:
        raise reader.error("ffn_dim_multiplier", "leaves the feed-forward network no width.")
    if config.confidence_head_with_markov and not config.markov_rank:
        raise reader.error(
            "confidence_head_with_markov", "needs a Markov head: markov_rank must not be 0."
        )
    if config.max_tokens < 1:
        raise reader.error(
            "block_size",
            "must be 2 or more where sample_from_anchor is false: it counts the anchor.",
        )
