import json

import pytest
import torch

from musespark.checkpoint.load import load_weights
from musespark.checkpoint.names import find_prefix
from musespark.checkpoint.shards import CheckpointReader
from musespark.config.model import DecoderConfig
from musespark.errors import CheckpointError, ConfigError
from musespark.model.decoder import Decoder
from musespark.testing import make_checkpoint, tensor_shapes, tiny_config


def tensors_of(folder):
    with CheckpointReader.open(folder) as reader:
        return {name: reader.read(name) for name in reader}


def load(folder):
    decoder = Decoder(DecoderConfig.from_folder(folder), dtype=torch.float32)
    with CheckpointReader.open(folder) as reader:
        load_weights(decoder.weight_slots(find_prefix(reader), reader.__contains__), reader)
    return dict(decoder.named_parameters())


@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [None, 100_000])
def test_config_names_and_dtypes(tmp_path, text_only, max_shard_bytes):
    config = tiny_config(mlp_layer_types=["dense"] + ["sparse"] * 5)
    folder = make_checkpoint(
        tmp_path / "a", config, text_only=text_only, max_shard_bytes=max_shard_bytes
    )
    assert folder == tmp_path / "a"
    assert DecoderConfig.from_folder(folder) == config
    raw = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == ("muse_spark_text" if text_only else "muse_spark")
    tensors = tensors_of(folder)
    prefix = "" if text_only else "model.language_model."
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(config, prefix)
    float32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert float32 == {
        name
        for name in tensors
        if name.endswith((".gate", "mlp.gate.weight", "e_score_correction_bias"))
    }
    assert {tensors[name].dtype for name in tensors.keys() - float32} == {torch.bfloat16}


def test_no_weight_is_neutral(tmp_path):
    """A norm of ones, a bias of zeros or a gate of zeros would hide a mistake."""
    for name, tensor in tensors_of(make_checkpoint(tmp_path / "a")).items():
        assert tensor.float().std() > 0.01, name
        assert tensor.isfinite().all(), name


def test_same_seed_same_file(tmp_path):
    one = make_checkpoint(tmp_path / "one", seed=3) / "model.safetensors"
    two = make_checkpoint(tmp_path / "two", seed=3) / "model.safetensors"
    other = make_checkpoint(tmp_path / "other", seed=4) / "model.safetensors"
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def test_configs_share_the_weights_they_have_in_common(tmp_path):
    one = tensors_of(make_checkpoint(tmp_path / "one"))
    dense = ["sparse"] * 5 + ["dense"]
    two = tensors_of(make_checkpoint(tmp_path / "two", mlp_layer_types=dense))
    assert one.keys() & two.keys()
    for name in one.keys() & two.keys():
        assert torch.equal(one[name], two[name]), name


def test_per_expert_keys_hold_the_same_model(tmp_path):
    fused = make_checkpoint(tmp_path / "fused")
    apart = make_checkpoint(tmp_path / "apart", per_expert=True, text_only=True)
    names = tensors_of(apart).keys()
    assert "layers.0.mlp.experts.7.up_proj.weight" in names
    assert "layers.0.mlp.experts.gate_up_proj" not in names
    one, two = load(fused), load(apart)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_an_expert_that_is_missing_is_named(tmp_path):
    folder = make_checkpoint(tmp_path / "a", per_expert=True, num_hidden_layers=1)
    decoder = Decoder(DecoderConfig.from_folder(folder), dtype=torch.float32)
    reader = CheckpointReader.open(folder)
    gone = "model.language_model.layers.0.mlp.experts.5.down_proj.weight"
    partial = CheckpointReader(folder, {name: reader.info(name) for name in reader if name != gone})
    slots = decoder.weight_slots(find_prefix(partial), partial.__contains__)
    with pytest.raises(CheckpointError, match=r"1 missing\.") as caught:
        load_weights(slots, partial)
    assert f"  {gone}\n" in str(caught.value)


def test_overrides():
    config = tiny_config()
    assert [layer.attention[:4] for layer in config.layers] == [
        *("slid", "full", "slid", "slid", "slid", "full"),
    ]
    assert all((layer.rope_theta > 0) == (layer.sliding_window == 8) for layer in config.layers)
    full = tiny_config(layer_types="full", num_hidden_layers=2)
    assert [(layer.attention, layer.rope_theta) for layer in full.layers] == [
        ("full_attention", 0.0)
    ] * 2
    sliding = tiny_config(layer_types="sliding", sliding_window=3, layer_rope_theta=1e4)
    assert {(layer.sliding_window, layer.rope_theta) for layer in sliding.layers} == {(3, 1e4)}
    dense = tiny_config(mlp_layer_types="dense", eos_token_ids=(2, 3))
    assert not dense.has_sparse_layers
    assert dense.eos_token_ids == (2, 3)


def test_overrides_of_a_given_config(tmp_path):
    base = tiny_config(layer_types="full", hidden_size=32)
    folder = make_checkpoint(tmp_path / "a", base, num_experts_per_tok=1)
    config = DecoderConfig.from_folder(folder)
    assert config.num_experts_per_tok == 1
    assert config.layers == base.layers
    assert config.hidden_size == 32


def test_overrides_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'num_local_experts'"):
        tiny_config(num_local_expert=3)
    with pytest.raises(ConfigError, match="must be a multiple of it, found 3"):
        make_checkpoint(tmp_path / "a", num_key_value_heads=3)
    with pytest.raises(ConfigError, match="has 2 entries, but num_hidden_layers is 6"):
        tiny_config(layer_types=["full", "sliding"])
    assert list(tmp_path.iterdir()) == []


def test_activations_stay_near_one(tmp_path):
    """Logits with structure, routers that are neither flat nor saturated, gentle gates."""
    config = tiny_config()
    tensors = tensors_of(make_checkpoint(tmp_path / "a", config, dtype=torch.float32))
    x = torch.randn(512, config.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = config.output_multiplier * x @ tensors["lm_head.weight"].T
    assert 2.0 < logits.std() < 4.0
    for index in range(config.num_hidden_layers):
        layer = f"model.language_model.layers.{index}."
        router = config.output_multiplier * x @ tensors[f"{layer}mlp.gate.weight"].T
        assert 1.0 < router.std() < 2.0
        scores = router.sigmoid()
        biased = scores + tensors[f"{layer}mlp.gate.e_score_correction_bias"]
        changed = scores.topk(2).indices.sort().values != biased.topk(2).indices.sort().values
        assert 0.05 < changed.any(-1).float().mean() < 0.6
        for gate in ("post_attention_residual_gate.gate", "post_feedforward_residual_gate.gate"):
            beta = (tensors[layer + gate] / config.residual_gate_temperature).sigmoid()
            assert 0.05 < beta.min() < 0.2 < beta.max() < 0.5
