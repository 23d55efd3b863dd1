import pytest
import torch

from musespark.checkpoint.names import find_prefix, is_skipped
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.source import resolve_checkpoint
from musespark.checkpoint.write import CheckpointWriter
from musespark.errors import CheckpointError


def reader_of(folder, *names):
    with CheckpointWriter(folder) as writer:
        for name in names:
            writer.add(name, torch.zeros(1))
    return CheckpointReader.open(folder)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_known_prefixes(tmp_path, prefix):
    reader = reader_of(tmp_path, f"{prefix}embed_tokens.weight", "lm_head.weight")
    assert find_prefix(reader) == prefix


def test_packaged_model_has_the_conditional_generation_layout():
    with CheckpointReader.open(resolve_checkpoint("spark-mini")) as reader:
        assert find_prefix(reader) == "model.language_model."
        assert not any(map(is_skipped, reader))


def test_no_decoder(tmp_path):
    reader = reader_of(tmp_path, "bert.embeddings.weight", "bert.pooler.weight")
    with pytest.raises(CheckpointError) as caught:
        find_prefix(reader)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: no Muse Spark decoder")
    assert "model.language_model.embed_tokens.weight" in message
    assert "The first of its 2 tensors: bert.embeddings.weight, bert.pooler.weight" in message


def test_two_decoders(tmp_path):
    reader = reader_of(tmp_path, "embed_tokens.weight", "model.embed_tokens.weight")
    with pytest.raises(CheckpointError, match=r"more than one decoder: model\.embed"):
        find_prefix(reader)


@pytest.mark.parametrize(
    "name",
    [
        "model.vision_tower.layers.0.attn.q_proj.weight",
        "model.vision_adapter.fc1.weight",
        "model.vision_projection.weight",
        "model.audio_tower.proj.bias",
        "vision_tower.ln_pre.bias",
        "model.language_model.layers.3.self_attn.q_scale",
        "layers.3.self_attn.k_scale",
        "model.layers.3.self_attn.v_scale",
        "model.language_model.rotary_emb.inv_freq",
        "layers.0.self_attn.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
    ],
)
def test_left_unread_knowingly(name):
    assert is_skipped(name)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.3.self_attn.q_proj.weight",
        "model.language_model.layers.3.self_attn.o_scale",
        "model.language_model.layers.3.self_attn.q_scale.weight",
        "model.language_model.layers.3.mlp.experts.gate_up_proj_weight_scale",
        "model.vision_towers.weight",
        "other.model.vision_tower.weight",
        "model.language_model.vision_tower",
    ],
)
def test_never_skipped(name):
    assert not is_skipped(name)
