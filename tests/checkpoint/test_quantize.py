import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from musespark.checkpoint.calibrate import InputScales
from musespark.checkpoint.load import load_weights
from musespark.checkpoint.names import find_prefix
from musespark.checkpoint.quantize import parse_layers, quantize_checkpoint
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.write import CheckpointWriter
from musespark.config.model import DecoderConfig
from musespark.config.parallel import Parallelism
from musespark.errors import CheckpointError, ConfigError
from musespark.llm.loading import load_decoder
from musespark.model.decoder import Decoder
from musespark.ops.nvfp4 import dequantize
from musespark.parallel.layout import Layout
from musespark.testing import make_checkpoint, tiny_config

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 3, 23]
LAYER = "model.language_model.layers.{}.mlp.experts."


def tensors_of(folder):
    with CheckpointReader.open(folder) as reader:
        return {name: reader.read(name).clone() for name in reader}


def dequantized(folder, target):
    """The checkpoint again with plain float32 experts, by the format's definition."""
    tensors = tensors_of(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    with CheckpointWriter(target) as writer:
        writer.write_json("config.json", config)
        for name, tensor in tensors.items():
            base, _, ending = name.partition("_proj_")
            if ending:
                continue
            if tensor.dtype == torch.uint8:
                scales = tensors[f"{base}_weight_scale"]
                scale_2 = tensors[f"{base}_weight_scale_2"]
                if base.endswith("gate_up_proj"):
                    inner = tensor.shape[1] // 2
                    scale_2 = scale_2.repeat_interleave(inner, dim=1)[..., None]
                else:
                    scale_2 = scale_2[:, None, None]
                tensor = dequantize(tensor, scales) * scale_2
            writer.add(name, tensor)
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", seed=3)


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized") / "model"
    return folder, quantize_checkpoint(source, folder)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("pack", [False, True])
def test_quantize_load_forward(quantized, tmp_path, dtype, pack):
    """The NVFP4 model computes what a plain model with the dequantized weights computes."""
    folder, _ = quantized
    plain = load_decoder(dequantized(folder, tmp_path / "plain"), dtype=dtype)
    packed = load_decoder(folder, dtype=dtype)
    if pack:
        packed.pack()
    expected, found = plain.compute_logits(IDS), packed.compute_logits(IDS)
    error = (found - expected).norm() / expected.norm()
    assert error < (2e-2 if dtype == "bfloat16" else 1e-6)


def test_it_stays_close_to_the_source(source, quantized):
    expected = load_decoder(source, dtype="float32").compute_logits(IDS)
    found = load_decoder(quantized[0], dtype="float32").compute_logits(IDS)
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.3


def test_keys_shapes_and_dtypes_are_those_of_the_format(source, quantized):
    folder, _ = quantized
    before, after = tensors_of(source), tensors_of(folder)
    E, H, inner = 8, 48, 32
    expected = {
        "gate_up_proj": ((E, 2 * inner, H // 2), torch.uint8),
        "gate_up_proj_weight_scale": ((E, 2 * inner, H // 16), torch.float8_e4m3fn),
        "gate_up_proj_weight_scale_2": ((E, 2), torch.float32),
        "gate_up_proj_input_scale": ((E, 2), torch.float32),
        "down_proj": ((E, H, inner // 2), torch.uint8),
        "down_proj_weight_scale": ((E, H, inner // 16), torch.float8_e4m3fn),
        "down_proj_weight_scale_2": ((E,), torch.float32),
        "down_proj_input_scale": ((E,), torch.float32),
        "post_expert_norm.weight": ((H,), torch.bfloat16),
    }
    for layer in range(6):
        prefix = LAYER.format(layer)
        found = {
            name.removeprefix(prefix): (tuple(tensor.shape), tensor.dtype)
            for name, tensor in after.items()
            if name.startswith(prefix)
        }
        if layer in (0, 5):
            assert set(found) == {"gate_up_proj", "down_proj", "post_expert_norm.weight"}
        else:
            assert found == expected
    untouched = [name for name in before if name in after and after[name].dtype != torch.uint8]
    assert len(untouched) == len(before) - 2 * 4
    for name in untouched:
        assert torch.equal(before[name], after[name])


def test_config_says_what_modelopt_says(quantized):
    folder, _ = quantized
    inside = json.loads((folder / "config.json").read_text())["quantization_config"]
    beside = json.loads((folder / "hf_quant_config.json").read_text())
    assert inside["quant_method"] == "modelopt"
    assert inside["quant_algo"] == beside["quantization"]["quant_algo"] == "NVFP4"
    assert inside["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert beside["quantization"]["group_size"] == 16
    assert inside["ignore"] == beside["quantization"]["exclude_modules"]
    assert {
        "lm_head",
        "model.language_model.layers.*.self_attn*",
        "model.language_model.layers.0.mlp.experts*",
        "model.language_model.layers.5.mlp.experts*",
        "model.vision_tower*",
    } < set(inside["ignore"])
    quantization = DecoderConfig.from_folder(folder).quantization
    assert quantization is not None
    assert [quantization.excludes_experts(layer, 8) for layer in range(6)] == [
        True, False, False, False, False, True,
    ]  # fmt: skip


def test_transformers_and_safetensors_read_it(quantized):
    folder, _ = quantized
    config = AutoConfig.from_pretrained(folder)
    assert config.quantization_config["quant_method"] == "modelopt"
    assert config.text_config.num_local_experts == 8
    tensors = load_file(folder / "model.safetensors")
    ours = tensors_of(folder)
    assert tensors.keys() == ours.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == ours[name].dtype
        assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_backend_computes_the_same(quantized, dtype):
    folder, _ = quantized
    logits = []
    for backend in ("auto", "reference"):
        config = DecoderConfig.from_folder(folder)
        layout = Layout(Parallelism(moe_backend=backend))
        decoder = Decoder(config, dtype=dtype, layout=layout)
        with CheckpointReader.open(folder) as reader:
            load_weights(decoder.weight_slots(find_prefix(reader), reader.__contains__), reader)
        decoder.finish_loading()
        decoder.pack()
        kept = decoder.get_submodule("layers.2.mlp.experts").gate_up_proj
        assert (kept is not None) == (backend == "reference")
        logits.append(decoder.compute_logits(IDS))
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def test_report(quantized, source):
    folder, report = quantized
    assert [layer.layer for layer in report.layers] == [1, 2, 3, 4]
    before, after = tensors_of(source), tensors_of(folder)
    for layer in report.layers:
        prefix = LAYER.format(layer.layer)
        down = dequantize(after[f"{prefix}down_proj"], after[f"{prefix}down_proj_weight_scale"])
        down = down * after[f"{prefix}down_proj_weight_scale_2"][:, None, None]
        exact = before[f"{prefix}down_proj"].float()
        assert layer.down == pytest.approx(float((down - exact).norm() / exact.norm()), rel=1e-4)
        assert 0.07 < layer.gate_up < 0.09
    assert report.target_bytes < report.source_bytes
    assert report.target_bytes == (folder / "model.safetensors").stat().st_size


def test_gate_and_up_get_a_scale_each(tmp_path):
    """An up projection 30 times smaller keeps its precision."""
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=2)
    tensors = tensors_of(source)
    key = f"{LAYER.format(0)}gate_up_proj"
    tensors[key][:, 32:] /= 30
    scaled = tmp_path / "scaled"
    with CheckpointWriter(scaled) as writer:
        writer.write_json("config.json", json.loads((source / "config.json").read_text()))
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    quantize_checkpoint(scaled, tmp_path / "target", exclude_layers=())
    after = tensors_of(tmp_path / "target")
    scale_2 = after[f"{key}_weight_scale_2"]
    ratio = scale_2[:, 0] / scale_2[:, 1]
    assert ((ratio > 15) & (ratio < 60)).all()
    up = dequantize(after[key], after[f"{key}_weight_scale"])[:, 32:] * scale_2[:, 1, None, None]
    exact = tensors[key][:, 32:].float()
    assert (up - exact).norm() / exact.norm() < 0.09


@pytest.mark.parametrize("choice", ["max", "mse"])
def test_scale_choices(source, quantized, tmp_path, choice):
    report = quantize_checkpoint(source, tmp_path / "target", scale_choice=choice)
    if choice == "mse":
        assert report.layers == quantized[1].layers
    else:
        for by_max, by_error in zip(report.layers, quantized[1].layers, strict=True):
            assert by_error.gate_up < 0.9 * by_max.gate_up
            assert by_error.down < 0.9 * by_max.down


@pytest.mark.parametrize("form", [{"per_expert": True}, {"text_only": True}, {}])
def test_every_layout_of_the_source(tmp_path, quantized, form):
    source = make_checkpoint(tmp_path / "source", seed=3, max_shard_bytes=100_000, **form)
    quantize_checkpoint(source, tmp_path / "target")
    expected = load_decoder(quantized[0], dtype="float32").compute_logits(IDS)
    assert torch.equal(
        load_decoder(tmp_path / "target", dtype="float32").compute_logits(IDS), expected
    )


def test_a_derivative_that_excludes_other_layers(tmp_path):
    """Middle layers left alone, first and last quantized, a dense layer, softmax routing."""
    config = tiny_config(
        num_hidden_layers=5,
        mlp_layer_types=["sparse", "sparse", "dense", "sparse", "sparse"],
        scoring_func="softmax",
        routed_scaling_factor=2.5,
    )
    source = make_checkpoint(tmp_path / "source", config)
    folder = tmp_path / "target"
    report = quantize_checkpoint(source, folder, exclude_layers=[1, 3])
    assert [layer.layer for layer in report.layers] == [0, 4]
    decoder = load_decoder(folder, dtype="float64")
    kinds = [type(getattr(layer.mlp, "experts", None)).__name__ for layer in decoder.layers]
    assert kinds == [
        "NVFP4Experts", "GroupedExperts", "NoneType", "GroupedExperts", "NVFP4Experts",
    ]  # fmt: skip
    plain = load_decoder(dequantized(folder, tmp_path / "plain"), dtype="float64")
    expected, found = plain.compute_logits(IDS), decoder.compute_logits(IDS)
    assert (found - expected).norm() / expected.norm() < 1e-6


def test_input_scales_are_written(source, tmp_path):
    scales = InputScales(torch.rand(8, 2), torch.rand(8))
    quantize_checkpoint(source, tmp_path / "target", input_scales={2: scales})
    after = tensors_of(tmp_path / "target")
    assert torch.equal(after[f"{LAYER.format(2)}gate_up_proj_input_scale"], scales.gate_up)
    assert torch.equal(after[f"{LAYER.format(2)}down_proj_input_scale"], scales.down)
    assert (after[f"{LAYER.format(1)}down_proj_input_scale"] == 1.0).all()


def test_files_beside_the_weights_come_along(tmp_path):
    source = make_checkpoint(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "preprocessor_config.json").write_text('{"size": 14}')
    quantize_checkpoint(source, tmp_path / "target")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "target" / name).read_text() == (source / name).read_text()
    copied = json.loads((tmp_path / "target" / "preprocessor_config.json").read_text())
    assert copied == {"size": 14}


def test_what_nobody_knows_is_copied(source, tmp_path):
    def change(tensors, _config):
        tensors[f"{LAYER.format(2)}router_noise"] = torch.arange(3)

    folder = broken(source, tmp_path / "more", change)
    quantize_checkpoint(folder, tmp_path / "target")
    assert tensors_of(tmp_path / "target")[f"{LAYER.format(2)}router_noise"].tolist() == [0, 1, 2]


def test_progress_ends_at_the_whole_source(source, tmp_path):
    calls = []
    report = quantize_checkpoint(
        source, tmp_path / "target", progress=lambda done, total: calls.append((done, total))
    )
    assert calls == sorted(calls)
    assert calls[-1] == (report.source_bytes, report.source_bytes)


def test_one_layers_experts_at_a_time(source, tmp_path, monkeypatch):
    """Experts are read one by one, and never beside those of another layer's reader."""
    reads = []
    original = CheckpointReader.read

    def read(self, name, index=()):
        if ".experts." in name and "_proj" in name:
            reads.append((id(self), name, index))
        return original(self, name, index)

    monkeypatch.setattr(CheckpointReader, "read", read)
    quantize_checkpoint(source, tmp_path / "target")
    quantized = [read for read in reads if read[2]]
    assert len(quantized) == 4 * 8 * 2
    assert all(index == (slice(e.start, e.start + 1),) for _, _, index in quantized for e in index)


def test_an_interrupted_run_leaves_nothing(source, tmp_path):
    class StoppedError(Exception):
        pass

    def stop(done, total):
        if done > total / 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize_checkpoint(source, tmp_path / "target", progress=stop)
    assert list(tmp_path.iterdir()) == []


def broken(source, target, change):
    tensors = tensors_of(source)
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    with CheckpointWriter(target) as writer:
        writer.write_json("config.json", config)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return target


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(source, tmp_path, value):
    def change(tensors, _config):
        tensors[f"{LAYER.format(2)}down_proj"][5, 3, 2] = value

    folder = broken(source, tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.5\.down_proj: .*finite"):
        quantize_checkpoint(folder, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_weights_of_another_config(source, tmp_path):
    def change(_tensors, config):
        config["text_config"]["moe_intermediate_size"] = 64

    folder = broken(source, tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=r"gate_proj is torch.bfloat16 \[32, 48\]"):
        quantize_checkpoint(folder, tmp_path / "target")


def test_a_quantized_source(quantized, tmp_path):
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize_checkpoint(quantized[0], tmp_path / "target")


def test_nothing_left_to_quantize(source, tmp_path):
    with pytest.raises(ConfigError, match=r"of 6 layers 6 have experts, and these are all excl"):
        quantize_checkpoint(source, tmp_path / "target", exclude_layers=range(6))


def test_widths_that_do_not_fit(tmp_path):
    source = make_checkpoint(tmp_path / "source", moe_intermediate_size=24)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size: .* multiple of 16, found 24"):
        quantize_checkpoint(source, tmp_path / "target")


def test_a_target_that_holds_something(source, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, tmp_path / "target")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("first,last", (0, 9)),
        ("", ()),
        ("none", ()),
        ("3, 5-7 ,5", (3, 5, 6, 7)),
        ("8-last", (8, 9)),
        ("first-2", (0, 1, 2)),
    ],
)
def test_layer_lists(text, expected):
    assert parse_layers(text, 10) == expected


@pytest.mark.parametrize("text", ["10", "7-5", "-1", "one", "3-", "2-10"])
def test_wrong_layer_lists(text):
    with pytest.raises(ConfigError, match="exclude-layers"):
        parse_layers(text, 10)


def test_excluded_but_quantized_weights_are_reported_by_name(quantized, tmp_path):
    folder, _ = quantized

    def change(_tensors, config):
        config["quantization_config"]["ignore"].append("*.layers.2.mlp.experts*")

    altered = broken(folder, tmp_path / "altered", change)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(altered)
    assert "layers.2.mlp.experts.down_proj: dtype uint8" in str(caught.value)
