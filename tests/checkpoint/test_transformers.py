"""Checkpoints that transformers writes, towers included, open and load; and the other way round."""

import json

import pytest
import torch
from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration, MuseSparkTextModel
from transformers.utils import logging

from musespark.checkpoint.load import load_weights
from musespark.checkpoint.names import find_prefix, is_skipped
from musespark.checkpoint.shards import CheckpointReader
from musespark.config.model import DecoderConfig
from musespark.errors import CheckpointError
from musespark.model.decoder import Decoder
from musespark.testing import make_checkpoint, tensor_shapes, tiny_config

logging.disable_progress_bar()

SMALL = {
    "text_config": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_hidden_size": 48,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
    },
    "audio_config": {
        "patch_sizes": [2],
        "hidden_sizes": [16],
        "depths": [1],
        "num_hidden_layers": 1,
        "out_hidden_size": 64,
    },
    "out_hidden_size": 32,
    "projector_hidden_size": 32,
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MuseSparkForConditionalGeneration(MuseSparkConfig(**SMALL)).eval()


def load(folder, dtype):
    decoder = Decoder(DecoderConfig.from_folder(folder), dtype=dtype)
    with CheckpointReader.open(folder) as reader:
        slots = decoder.weight_slots(find_prefix(reader), reader.__contains__)
        return decoder, load_weights(slots, reader), reader


@pytest.mark.parametrize("shard_size", ["50GB", "100KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_by_transformers(model, tmp_path, shard_size, dtype):
    model.to(dtype).save_pretrained(tmp_path, max_shard_size=shard_size)
    model.float()
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "100KB")
    decoder, report, reader = load(tmp_path, dtype)
    text = {name for name in model.state_dict() if not is_skipped(name)}
    towers = set(model.state_dict()) - text
    assert set(report.skipped) == towers
    assert any(name.startswith("model.vision_tower.") for name in towers)
    assert any(name.startswith("model.audio_tower.") for name in towers)
    assert report.num_tensors == len(text)
    # Every byte of the text part is read once, and none of the towers'.
    assert reader.bytes_read == sum(reader.info(name).num_bytes for name in text)
    state = model.state_dict()
    assert torch.equal(
        decoder.embed_tokens.weight, state["model.language_model.embed_tokens.weight"].to(dtype)
    )
    assert torch.equal(
        decoder.layers[2].mlp.experts.down_proj,
        state["model.language_model.layers.2.mlp.experts.down_proj"].to(dtype),
    )
    assert torch.equal(decoder.lm_head.weight, state["lm_head.weight"].to(dtype))


def test_text_model_saved_alone_lacks_its_head(model, tmp_path):
    model.model.language_model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, torch.float32)
    message = str(caught.value)
    assert "1 missing." in message
    assert "lm_head.weight" in message
    assert "MuseSparkTextModel saved alone has no output projection" in message


def test_config_that_does_not_fit_its_weights(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"moe_intermediate_size": 16, "mlp_layer_types": ["sparse"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, torch.float32)
    message = str(caught.value)
    assert "8 missing, 3 unexpected, 4 wrongly shaped." in message
    assert "  model.language_model.layers.0.mlp.gate_proj.weight\n" in message
    assert (
        "  model.language_model.layers.1.mlp.experts.gate_up_proj: shape [8, 64, 48], but the "
        "config makes it [8, 32, 48]\n"
    ) in message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp_layer_types": ["dense", "sparse"] * 3},
        {"layer_types": "full", "num_hidden_layers": 2, "num_key_value_heads": 1},
    ],
    ids=["default", "mixed", "full"],
)
def test_transformers_opens_a_random_checkpoint(tmp_path, changes):
    make_checkpoint(tmp_path, dtype=torch.float32, max_shard_bytes=100_000, **changes)
    logging.set_verbosity_error()  # It reports the towers, which the file lacks on purpose.
    model, info = MuseSparkForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert all(map(is_skipped, info["missing_keys"]))
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    state = model.state_dict()
    with CheckpointReader.open(tmp_path) as reader:
        for name in reader:
            assert torch.equal(state[name], reader.read(name))
    text = {name for name in state if not is_skipped(name)}
    assert text == set(tensor_shapes(tiny_config(**changes), "model.language_model."))
    assert DecoderConfig.from_dict(model.config.to_dict()) == tiny_config(**changes)


def test_transformers_opens_a_text_only_checkpoint(tmp_path):
    make_checkpoint(tmp_path, dtype=torch.float32, text_only=True)
    logging.set_verbosity_error()
    _, info = MuseSparkTextModel.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert set(info["unexpected_keys"]) == {"lm_head.weight"}  # A text model has no head.
