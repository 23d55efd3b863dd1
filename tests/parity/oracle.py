"""transformers' own Muse Spark on the same files, and the configs that both must agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MuseSparkForConditionalGeneration
from transformers.utils import logging

from musespark.testing import make_checkpoint

# Checkpoints hold no towers, and from_pretrained would list every weight of theirs.
logging.set_verbosity_error()
logging.disable_progress_bar()


@dataclass(frozen=True)
class Case:
    """One tiny model: what differs from `tiny_config`, and from its random weights."""

    name: str
    overrides: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[str, Tensor], None] | None = None
    """Changes a checkpoint tensor in place, given its key."""

    def write(self, folder: Path, dtype: torch.dtype, seed: int = 0) -> Path:
        """The checkpoint, on disk."""
        make_checkpoint(folder, dtype=dtype, seed=seed, **self.overrides)
        if self.edit is not None:
            path = folder / "model.safetensors"
            tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
            for name, tensor in tensors.items():
                self.edit(name, tensor)
            save_file(tensors, path, metadata={"format": "pt"})
        return folder


def _extreme_gates(name: str, tensor: Tensor) -> None:
    """Some channels take the branch alone, some the stream alone, some nearly so."""
    if name.endswith("residual_gate.gate"):
        tensor[0::16], tensor[1::16], tensor[2::16] = 50.0, -50.0, 2.0


def _strong_bias(name: str, tensor: Tensor) -> None:
    """Ten times the usual: scores lie between 0 and 1, so that the bias alone often decides."""
    if name.endswith("e_score_correction_bias"):
        tensor *= 10


def _small_activations(name: str, tensor: Tensor) -> None:
    """Inputs of norms so small that each norm's own epsilon shows."""
    ends = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight", "down_proj")
    if name.endswith((*ends, "pre_expert_proj.weight", "post_expert_proj.weight")):
        tensor *= 3e-3


CASES = [
    Case("default pattern"),
    Case("all full", {"layer_types": "full"}),
    Case("all full, rotary", {"layer_types": "full", "layer_rope_theta": 500_000.0}),
    Case("all sliding", {"layer_types": "sliding"}),
    Case("all sliding, not rotary", {"layer_types": "sliding", "layer_rope_theta": 0.0}),
    Case("window 3", {"sliding_window": 3}),
    Case("window beyond the sequence", {"sliding_window": 1000}),
    Case("theta 10000", {"layer_rope_theta": [10_000.0, 0.0, *[10_000.0] * 3, 0.0]}),
    Case("dense and sparse", {"mlp_layer_types": ["dense", "sparse", "sparse"] * 2}),
    Case("all dense", {"mlp_layer_types": "dense"}),
    Case("one expert per token", {"num_experts_per_tok": 1}),
    Case("every expert per token", {"num_experts_per_tok": 8}),
    Case("a single expert", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    Case("one key-value head", {"num_key_value_heads": 1}),
    Case("a key-value head per head", {"num_key_value_heads": 4}),
    Case("twelve experts", {"num_local_experts": 12, "num_experts_per_tok": 5}),
    Case("gates at both extremes", edit=_extreme_gates),
    Case("small activations", {"mlp_layer_types": ["sparse", "dense"] * 3}, _small_activations),
    # The norm after the FFN takes a common factor away again, but for its epsilon.
    Case("scaled routing", {"routed_scaling_factor": 2.5}, _small_activations),
    Case("bias decides", edit=_strong_bias),
    Case("one layer", {"num_hidden_layers": 1}),
    Case("wide heads", {"head_dim": 64, "num_hidden_layers": 3}),
    Case("low cap", {"final_logit_softcapping": 3.0, "output_multiplier": 1.0}),
]


def load_oracle(
    folder: Path, dtype: torch.dtype, attention: str = "sdpa", experts: str = "grouped_mm"
) -> MuseSparkForConditionalGeneration:
    """The same files through transformers."""
    model = MuseSparkForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation=experts
    )
    return model.eval()


@torch.inference_mode()
def oracle_logits(model: MuseSparkForConditionalGeneration, token_ids: Sequence[int]) -> Tensor:
    """[T, V] of one sequence, without a cache."""
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation by transformers, and how sure of it transformers itself is."""

    token_ids: list[int]
    num_decided: int
    """Tokens up to the first whose top-two margin is within cached-versus-uncached noise."""


@torch.inference_mode()
def oracle_greedy(
    model: MuseSparkForConditionalGeneration, prompt: Sequence[int], count: int
) -> Greedy:
    """`count` tokens through transformers' own cache."""
    tokens, rows, cache = list(prompt), [], None
    new = tokens
    for _ in range(count):
        out = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, -1])
        new = [int(rows[-1].argmax())]
        tokens += new
    cached = torch.stack(rows)
    uncached = oracle_logits(model, tokens[:-1])[len(prompt) - 1 :]
    noise = (cached - uncached).abs().max()
    top = cached.topk(2).values
    undecided = ((top[:, 0] - top[:, 1]) <= 2 * noise).nonzero()
    num_decided = int(undecided[0]) if len(undecided) else count
    return Greedy(tokens[len(prompt) :], num_decided)
