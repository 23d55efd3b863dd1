"""A draft's files against its config: both ways, by name, shape and dtype."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from musespark.errors import CheckpointError, ConfigError
from musespark.llm.loading import load_draft
from musespark.testing import make_draft, tiny_config

TARGET = tiny_config()
EMBEDDING = torch.randn(TARGET.vocab_size, TARGET.hidden_size)


@pytest.fixture
def folder(tmp_path):
    return make_draft(tmp_path / "draft", TARGET)


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def load(folder, target=TARGET):
    return load_draft(folder, target, EMBEDDING, dtype=torch.float32)


def error_of(folder, target=TARGET):
    with pytest.raises(CheckpointError) as caught:
        load(folder, target)
    return str(caught.value)


def test_every_weight_is_taken_and_none_is_left(folder):
    draft, tensors = load(folder), load_file(folder / "model.safetensors")
    assert torch.equal(draft.fc.weight, tensors["fc.weight"].float())
    assert torch.equal(draft.d2t, tensors["d2t"])
    gate = draft.layers[1].after_ffn.gate
    assert torch.equal(gate, tensors["layers.1.add_ffn.gate"])
    # Rows of a head: the firsts of all pairs, then the seconds.
    stored = tensors["layers.0.self_attn.k_proj.weight"].float()
    held = draft.layers[0].self_attn.kv_proj.weight[: len(stored)]
    assert torch.equal(held[:8], stored[0:16:2])
    assert torch.equal(held[8:16], stored[1:16:2])


def test_known_extras_are_ignored(folder):
    def add(tensors):
        tensors["t2d"] = torch.ones(128, dtype=torch.bool)
        tensors["embed_tokens.weight"] = EMBEDDING.clone()
        tensors["mask_embedding"] = torch.zeros(64)

    edit(folder, add)
    load(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("d2t", "Missing (1):\n  d2t"),
        ("lm_head.weight", "Missing (1):\n  lm_head.weight"),
        ("layers.0.add_attn.gate", "Missing (1):\n  layers.0.add_attn.gate"),
        ("markov_head.markov_w1.weight", "Missing (1):\n  markov_head.markov_w1.weight"),
        ("confidence_head.proj.bias", "Missing (1):\n  confidence_head.proj.bias"),
    ],
)
def test_missing(folder, name, said):
    edit(folder, lambda tensors: tensors.pop(name))
    message = error_of(folder)
    assert said in message
    assert "one and the same save of a DSpark draft" in message


def test_unexpected(folder):
    edit(folder, lambda tensors: tensors.update({"layers.0.post_attn_norm.weight": torch.ones(64)}))
    assert "Unexpected (1):\n  layers.0.post_attn_norm.weight" in error_of(folder)


def test_wrong_shapes_and_dtypes(folder):
    def change(tensors):
        tensors["fc.weight"] = torch.zeros(64, 64)
        tensors["d2t"] = tensors["d2t"].float()

    edit(folder, change)
    message = error_of(folder)
    assert "fc.weight: shape [64, 64], but the config makes it [64, 128]" in message
    assert "d2t: dtype float32, but it must be int64" in message


@pytest.mark.parametrize(("place", "offset"), [(127, 1), (0, -1), (5, 1000)])
def test_a_map_out_of_the_targets_vocabulary(folder, place, offset):
    def change(tensors):
        tensors["d2t"][place] = offset

    edit(folder, change)
    message = error_of(folder)
    assert f"d2t: draft token {place} becomes target token {place + offset}" in message
    assert "0 to 127" in message


def test_a_map_onto_one_token_twice(folder):
    def change(tensors):
        tensors["d2t"][5] = 1

    edit(folder, change)
    assert "several draft tokens become the same target token" in error_of(folder)


def test_another_target_is_refused_before_any_weight_is_read(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="made for another target"):
        load(folder, tiny_config(vocab_size=64))


def test_no_draft_at_all(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "muse_spark"}')
    with pytest.raises(ConfigError, match="a draft's must be 'muse_spark_dspark'"):
        load(tmp_path)
