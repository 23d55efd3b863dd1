"""Write a trained model in the Hugging Face layout."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.config import Shape
from training.model import Decoder
from training.tokenizer import main as write_tokenizer

ASSETS = Path(__file__).parent.parent / "src/musespark/assets/spark-mini"
PREFIX = "model.language_model."
KEPT_IN_FLOAT32 = (".mlp.gate.", "residual_gate.")


def exported_weights(model: Decoder) -> dict[str, Tensor]:
    """Return tensors by checkpoint name: bfloat16, but for the router and the residual gates."""
    weights = {}
    for name, tensor in model.state_dict().items():
        key = name if name.startswith("lm_head") else f"{PREFIX}{name}"
        dtype = torch.float32 if any(kept in name for kept in KEPT_IN_FLOAT32) else torch.bfloat16
        weights[key] = tensor.detach().to("cpu", dtype).contiguous()
    return weights


def exported_config(shape: Shape) -> dict[str, object]:
    """Return config.json, the text config at its top level."""
    layers = range(shape.num_hidden_layers)
    theta = shape.rope_theta
    return {
        "architectures": ["MuseSparkTextModel"],
        "model_type": "muse_spark_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 4 * shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "moe_hidden_size": shape.moe_hidden_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "num_local_experts": shape.num_local_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "sliding_window": shape.sliding_window,
        "qk_scale_factor": shape.qk_scale_factor,
        "output_multiplier": shape.output_multiplier,
        "final_logit_softcapping": shape.final_logit_softcapping,
        "residual_gate_temperature": shape.residual_gate_temperature,
        "rms_norm_eps": shape.rms_norm_eps,
        "post_norm_eps": shape.post_norm_eps,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": [259, 257],
        "pad_token_id": 260,
        "layer_types": [
            "full_attention" if shape.is_full(i) else "sliding_attention" for i in layers
        ],
        "mlp_layer_types": ["sparse"] * shape.num_hidden_layers,
        # transformers takes the angle base from rope_parameters and reads only "0 or not" from
        # layer_rope_theta; both must say the same.
        "layer_rope_theta": [0 if shape.is_full(i) else theta for i in layers],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def export(model: Decoder, folder: Path) -> None:
    """Write model.safetensors, config.json, the tokenizer and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(exported_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(exported_config(model.shape), indent=2) + "\n")
    for name in ("chat_template.jinja", "generation_config.json"):
        shutil.copyfile(ASSETS / name, folder / name)
    write_tokenizer(folder)


def load_exported(model: Decoder, folder: Path) -> None:
    """Read back the weights that `export` wrote, rounded as they are there."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix(PREFIX): w for name, w in weights.items()})
