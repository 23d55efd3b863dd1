"""Write a trained draft in the layout of DSpark drafts."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.config import SPARK_MINI
from training.draft_config import DraftShape
from training.draft_model import Draft


def exported_draft_weights(draft: Draft) -> dict[str, Tensor]:
    """Return tensors by checkpoint name: bfloat16, but for the residual gates."""
    weights = {
        name: tensor.detach()
        .to("cpu", torch.float32 if name.endswith(".gate") else torch.bfloat16)
        .contiguous()
        for name, tensor in draft.state_dict().items()
    }
    # The draft speaks the target's whole vocabulary.
    return weights | {"d2t": torch.zeros(SPARK_MINI.vocab_size, dtype=torch.int64)}


def exported_draft_config(shape: DraftShape) -> dict[str, object]:
    """Return config.json."""
    return {
        "architectures": ["MuseSparkDSparkForCausalLM"],
        "model_type": "muse_spark_dspark",
        "dtype": "bfloat16",
        "vocab_size": SPARK_MINI.vocab_size,
        "draft_vocab_size": SPARK_MINI.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "ffn_dim_multiplier": shape.ffn_dim_multiplier,
        "rms_norm_eps": shape.rms_norm_eps,
        "rms_post_norm_eps": shape.rms_post_norm_eps,
        "norm_affine": True,
        "post_norm_affine": False,
        "norm_zero_centered_gamma": True,
        "post_norm_gain_center_type": "one",
        "output_norm_gain_center_type": "zero",
        "use_qk_norm": True,
        "use_sqrt_attn_scaling": True,
        "use_attn_o_norm": True,
        "use_attn_o_gate": True,
        "use_residual_gate": True,
        "use_ffn_learnable_scales": True,
        "residual_dtype": "fp32",
        "use_rope": True,
        "rope_theta": shape.rope_theta,
        "global_attn_cfg": [shape.window],
        "metap": {"use_metap": True, "metap_mode": "sp", "base_width": shape.base_width},
        "output_soft_cap_temp": shape.output_soft_cap_temp,
        "target_layer_ids": list(shape.target_layer_ids),
        "target_hidden_size": SPARK_MINI.hidden_size,
        "mask_token_id": shape.mask_token_id,
        "block_size": shape.block_size,
        "sample_from_anchor": True,
        "markov_rank": shape.markov_rank,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def export_draft(draft: Draft, folder: Path) -> None:
    """Write model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(exported_draft_weights(draft), folder / "model.safetensors", {"format": "pt"})
    config = exported_draft_config(draft.shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
