"""What a Muse Spark decoder is made of, read from config.json.

Nothing is derived that the file states: the layer pattern, each layer's RoPE theta and each
layer's kind of feed-forward network are read, never guessed from the layer's number.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from musespark.config.quantization import QuantizationConfig, read_quantization
from musespark.config.strict import FieldReader, read_json_object
from musespark.errors import ConfigError

AttentionKind = Literal["full_attention", "sliding_attention"]
MlpKind = Literal["sparse", "dense"]
ScoringFunction = Literal["sigmoid", "softmax"]

# Fields of a transformers text config that say nothing about this model's forward pass: training
# and bookkeeping, generation defaults, and the output switches of transformers itself.
IRRELEVANT_FIELDS = (
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "chunk_size_feed_forward",
    "dtype", "id2label", "initializer_range", "is_encoder_decoder", "keys_to_ignore_at_inference",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "output_router_logits",
    "problem_type", "return_dict", "router_aux_loss_coef", "torch_dtype", "transformers_version",
    "use_cache", "cross_attention_hidden_size", "pad_token_id",
)  # fmt: skip

_SHARED_FIELDS = ("bos_token_id", "eos_token_id", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from layer to layer."""

    attention: AttentionKind
    rope_theta: float
    """Base of the rotary angles; 0 means no rotary embedding on this layer."""
    mlp: MlpKind
    sliding_window: int | None
    """Keys a query sees, its own included, on a sliding layer; None on a full layer."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Muse Spark text decoder. Field names are config.json's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_hidden_size: int
    moe_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    qk_scale_factor: float = 5.4730064863875
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 20.0
    residual_gate_temperature: float = 0.3
    routed_scaling_factor: float = 1.0
    scoring_func: ScoringFunction = "sigmoid"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: QuantizationConfig | None = None

    @property
    def attention_scale(self) -> float:
        """Softmax scale: 1/sqrt(head_dim), with the query scale folded in.

        Folding is exact, because QK-norm has no weight and RoPE is a rotation.
        """
        return self.qk_scale_factor / math.sqrt(self.head_dim)

    @property
    def has_sparse_layers(self) -> bool:
        """Whether any layer's feed-forward network is a mixture of experts."""
        return any(layer.mlp == "sparse" for layer in self.layers)

    @classmethod
    def from_folder(cls, folder: Path) -> "DecoderConfig":
        """Read `folder`/config.json, and hf_quant_config.json where quantization is told there.

        Raises:
            ConfigError: names the file and the field that is missing, misspelt or unsupported.
        """
        path = folder / "config.json"
        config = cls.from_dict(read_json_object(path), where=str(path))
        quant_path = folder / "hf_quant_config.json"
        if config.quantization is None and quant_path.exists():
            quantization = read_quantization(read_json_object(quant_path), str(quant_path))
            config = dataclasses.replace(config, quantization=quantization)
        return config

    @classmethod
    def from_dict(cls, fields: dict[str, Any], where: str = "config.json") -> "DecoderConfig":
        """Build from the JSON object of config.json, nested under `text_config` or text-only.

        Args:
            fields: the parsed JSON.
            where: the file's name, for errors.

        Raises:
            ConfigError: names the field that is missing, misspelt or unsupported.
        """
        quantization = None
        if (quant_fields := fields.get("quantization_config")) is not None:
            quantization = read_quantization(quant_fields, f"{where}: quantization_config")
        model_type = fields.get("model_type")
        if "text_config" in fields:
            if model_type != "muse_spark":
                raise ConfigError(
                    f"{where}: model_type: must be 'muse_spark', found {model_type!r}. "
                    "This engine runs the Muse Spark family only."
                )
            text, outer, where = fields["text_config"], where, f"{where}: text_config"
            if not isinstance(text, dict):
                raise ConfigError(f"{where}: must be an object, found {text!r}.")
            text = _with_shared_fields(text, fields, outer)
        elif model_type == "muse_spark":
            raise FieldReader(fields, where).missing("text_config")
        else:
            if model_type != "muse_spark_text":
                raise ConfigError(
                    f"{where}: model_type: must be 'muse_spark' (with a text_config) or "
                    f"'muse_spark_text', found {model_type!r}."
                )
            text = {name: value for name, value in fields.items() if name != "quantization_config"}
        return cls._from_text_fields(FieldReader(text, where), quantization)

    @classmethod
    def _from_text_fields(
        cls, reader: FieldReader, quantization: QuantizationConfig | None
    ) -> "DecoderConfig":
        num_layers = reader.take_positive("num_hidden_layers")
        config = cls(
            vocab_size=reader.take_positive("vocab_size"),
            hidden_size=reader.take_positive("hidden_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=reader.take_positive("num_attention_heads"),
            num_key_value_heads=reader.take_positive("num_key_value_heads"),
            head_dim=reader.take_positive("head_dim"),
            intermediate_size=reader.take_positive("intermediate_size"),
            moe_hidden_size=reader.take_positive("moe_hidden_size"),
            moe_intermediate_size=reader.take_positive("moe_intermediate_size"),
            num_local_experts=reader.take_positive("num_local_experts"),
            num_experts_per_tok=reader.take_positive("num_experts_per_tok"),
            sliding_window=reader.take_positive("sliding_window"),
            max_position_embeddings=reader.take_positive("max_position_embeddings"),
            layers=_read_layers(reader, num_layers),
            rms_norm_eps=reader.take_positive("rms_norm_eps", float),
            post_norm_eps=reader.take_positive("post_norm_eps", float),
            qk_scale_factor=reader.take_positive("qk_scale_factor", float),
            output_multiplier=reader.take_positive("output_multiplier", float),
            final_logit_softcapping=reader.take_positive("final_logit_softcapping", float),
            residual_gate_temperature=reader.take_positive("residual_gate_temperature", float),
            routed_scaling_factor=reader.take_positive("routed_scaling_factor", float, 1.0),
            scoring_func=reader.take("scoring_func", str, "sigmoid"),
            bos_token_id=reader.take("bos_token_id", int, None),
            eos_token_ids=_read_eos(reader),
            quantization=quantization,
        )
        _refuse_unsupported(reader)
        reader.ignore(*IRRELEVANT_FIELDS)
        reader.finish()
        _check_sizes(config, reader)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The text-only config.json of this decoder (quantization left out)."""
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("layers", "eos_token_ids", "quantization", "scoring_func")
        }
        thetas = [layer.rope_theta for layer in self.layers]
        rotary = next((theta for theta in thetas if theta > 0), 500_000.0)
        fields |= {
            "model_type": "muse_spark_text",
            "architectures": ["MuseSparkTextModel"],
            "eos_token_id": list(self.eos_token_ids) or None,
            "hidden_act": "silu",
            "layer_types": [layer.attention for layer in self.layers],
            "mlp_layer_types": [layer.mlp for layer in self.layers],
            "layer_rope_theta": thetas,
            # transformers takes the base from here and only "rotary or not" from the list.
            "rope_parameters": {"rope_type": "default", "rope_theta": rotary},
            "tie_word_embeddings": False,
        }
        if self.scoring_func != "sigmoid":
            fields["scoring_func"] = self.scoring_func
        return fields


def _with_shared_fields(text: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The text part, completed with what conditional-generation configs may keep beside it."""
    known = (*_SHARED_FIELDS, "model_type", "quantization_config", "text_config")
    for name in fields.keys() - set(known):
        # The rest of the outer object is the towers' business; only near misses are typos.
        if similar := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            raise ConfigError(f"{where}: unknown field: {name!r} (did you mean {similar[0]!r}?).")
    text = dict(text)
    for shared in _SHARED_FIELDS:
        if text.get(shared) is None and shared in fields:
            text[shared] = fields[shared]
    return text


def _read_layers(reader: FieldReader, num_layers: int) -> tuple[LayerConfig, ...]:
    kinds = reader.take_layer_list(
        "layer_types", num_layers, str, ("full_attention", "sliding_attention")
    )
    thetas = reader.take_layer_list("layer_rope_theta", num_layers, float)
    mlps = reader.take_layer_list("mlp_layer_types", num_layers, str, ("sparse", "dense"))
    window = reader.take_positive("sliding_window")
    for index, theta in enumerate(thetas):
        if theta < 0:
            raise reader.error(f"layer_rope_theta[{index}]", f"must not be negative: {theta}.")
    return tuple(
        LayerConfig(
            attention=kind,
            rope_theta=float(theta),
            mlp=mlp,
            sliding_window=window if kind == "sliding_attention" else None,
        )
        for kind, theta, mlp in zip(kinds, thetas, mlps, strict=True)
    )


def _read_eos(reader: FieldReader) -> tuple[int, ...]:
    """The end tokens. Cut-down models often keep the released ids, beyond their own vocabulary:
    such a token never comes, and no harm is done."""
    raw = reader.take("eos_token_id", object, None)
    ids = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise reader.error("eos_token_id", f"must be a token id or a list of them, found {raw!r}.")
    return tuple(ids)


def _refuse_unsupported(reader: FieldReader) -> None:
    """Settings that would need a different forward pass."""
    if (activation := reader.take("hidden_act", str, "silu")) != "silu":
        raise reader.error("hidden_act", f"only 'silu' is supported, found {activation!r}.")
    _refuse_scaled_rope(reader)
    if shared := reader.take("num_shared_experts", int, 0):
        raise reader.error(
            "num_shared_experts", f"shared experts are not supported, found {shared}."
        )
    for expert_groups in ("n_group", "topk_group"):
        if (groups := reader.take(expert_groups, int, 1)) > 1:
            raise reader.error(expert_groups, f"grouped routing is not supported, found {groups}.")
    if reader.take("attention_bias", bool, False):
        raise reader.error("attention_bias", "projections with a bias are not supported.")
    if reader.take("tie_word_embeddings", bool, False):
        raise reader.error("tie_word_embeddings", "a tied lm_head is not supported.")


def _refuse_scaled_rope(reader: FieldReader) -> None:
    rope = FieldReader(reader.take("rope_parameters", dict, {}), f"{reader.where}: rope_parameters")
    if (rope_type := rope.take("rope_type", str, "default")) != "default":
        raise rope.error(
            "rope_type", f"must be 'default' (unscaled rotary embedding), found {rope_type!r}."
        )
    if (share := rope.take("partial_rotary_factor", float, 1.0)) != 1.0:
        raise rope.error("partial_rotary_factor", f"heads are rotated whole here, found {share}.")
    # `layer_rope_theta` holds the base of each layer; this one is transformers' default for it.
    rope.ignore("rope_theta")
    rope.finish()
    if reader.take("rope_scaling", dict, None):
        raise reader.error("rope_scaling", "scaled rotary embeddings are not supported.")


def _check_sizes(config: DecoderConfig, reader: FieldReader) -> None:
    """Sizes that must fit one another."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise reader.error(
            "num_key_value_heads",
            f"num_attention_heads ({config.num_attention_heads}) must be a multiple of it, "
            f"found {config.num_key_value_heads}.",
        )
    if config.head_dim % 2:
        raise reader.error("head_dim", f"must be even for RoPE, found {config.head_dim}.")
    if config.num_experts_per_tok > config.num_local_experts:
        raise reader.error(
            "num_experts_per_tok",
            f"cannot exceed num_local_experts ({config.num_local_experts}), "
            f"found {config.num_experts_per_tok}.",
        )
    if config.scoring_func not in ("sigmoid", "softmax"):
        raise reader.error(
            "scoring_func", f"must be 'sigmoid' or 'softmax', found {config.scoring_func!r}."
        )
