"""`musespark inspect`, as a person calls it, on whole and on damaged checkpoints."""

import json

import pytest
from typer.testing import CliRunner

from musespark.checkpoint.inspect import inspect_checkpoint, number_ranges, part_of
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.write import CheckpointWriter
from musespark.cli.main import app
from musespark.testing import make_checkpoint, tensor_shapes, tiny_config


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def sharded(tmp_path):
    return make_checkpoint(tmp_path / "model", max_shard_bytes=100_000)


def run(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def run_json(*arguments):
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.output)


def copy_with(source, target, *, leave_out=(), rename=(), more=()):
    """The same checkpoint with some tensors changed."""
    renamed = dict(rename)
    with CheckpointReader.open(source) as reader, CheckpointWriter(target) as writer:
        writer.write_json("config.json", json.loads((source / "config.json").read_text()))
        for name in reader:
            if name not in leave_out:
                writer.add(renamed.get(name, name), reader.read(name).clone())
        for name, tensor in more:
            writer.add(name, tensor)
    return target


def test_a_whole_checkpoint_fits_one_screen(whole):
    result = run(whole, "--no-tree")
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) <= 24
    assert "It would load." in result.output
    assert "sFsssF" in result.output
    assert "BBBBBB" in result.output


def test_the_tree_names_every_kind_of_tensor_with_shape_and_dtype(whole):
    output = run(whole).output
    assert "layers.{0-5}" in output
    assert "gate_up_proj  bfloat16 [8, 64, 48] x 6" in output
    assert "gate.weight  float32 [8, 64] x 6" in output


def test_json_adds_up_to_the_bytes_of_the_files(whole):
    code, report = run_json(whole)
    assert code == 0
    assert report["loads"] is True
    shapes = tensor_shapes(tiny_config(), "model.language_model.")
    assert report["num_tensors"] == len(shapes)
    file = whole / "model.safetensors"
    assert file.stat().st_size - 20_000 < report["num_bytes"] < file.stat().st_size
    for table in ("bytes_by_part", "bytes_by_dtype"):
        assert sum(report[table].values()) == report["num_bytes"]
    assert sum(group["num_bytes"] for group in report["groups"]) == report["num_bytes"]
    assert "other" not in report["bytes_by_part"]


def test_quantized_experts_and_their_layers_are_told(whole, tmp_path):
    quantize_checkpoint(whole, tmp_path / "nvfp4", exclude_layers=frozenset({0, 5}))
    result = run(tmp_path / "nvfp4")
    assert result.exit_code == 0, result.output
    assert "B4444B" in result.output
    assert "layers.{1-4}" in result.output
    assert "layers.{0,5}" in result.output
    assert "NVFP4" in result.output


def test_missing_and_unexpected_tensors_are_listed(whole, tmp_path):
    gone = "model.language_model.layers.3.mlp.gate.weight"
    broken = copy_with(whole, tmp_path / "model", rename=[(gone, gone + "s")])
    code, report = run_json(broken)
    assert code == 1
    assert report["missing"] == [gone]
    assert report["unexpected"] == [gone + "s"]
    output = run(broken).output
    assert "missing (1)" in output
    assert "It would not load." in output


def test_skipped_tensors_are_listed_and_do_no_harm(whole, tmp_path):
    import torch

    tower = ("model.vision_tower.patch.weight", torch.ones(2, 2))
    code, report = run_json(copy_with(whole, tmp_path / "model", more=[tower]))
    assert code == 0
    assert report["skipped"] == [tower[0]]
    assert report["bytes_by_part"]["skipped"] == 16


def test_another_config_makes_wrong_shapes(whole, tmp_path):
    folder = copy_with(whole, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["moe_hidden_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    code, report = run_json(folder)
    assert code == 1
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    assert report["misshaped"][name] == "[8, 48, 32], the config makes it [8, 32, 32]"


def test_a_cut_shard_leaves_the_others_readable(sharded):
    first = sorted(sharded.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-7])
    code, report = run_json(sharded)
    assert code == 1
    assert "truncated" in report["problems"][0]
    assert report["num_tensors"] > 0
    broken = [file for file in report["files"] if file["problem"]]
    assert [file["name"] for file in broken] == [first.name]


def test_a_lost_shard_is_named(sharded):
    lost = sorted(sharded.glob("*.safetensors"))[-1]
    lost.unlink()
    code, report = run_json(sharded)
    assert code == 1
    assert lost.name in report["problems"][0]
    assert report["missing"]


@pytest.mark.parametrize("content", ["{", '{"model_type": "llama"}', None])
def test_a_damaged_config_leaves_the_tensors_readable(whole, tmp_path, content):
    folder = copy_with(whole, tmp_path / "model")
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(content)
    code, report = run_json(folder)
    assert code == 1
    assert "config.json" in report["problems"][0]
    assert report["config"] is None
    assert report["num_tensors"] > 0
    assert "It would not load." in run(folder).output


def test_an_empty_folder(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "model.safetensors" in result.output


def test_names_with_braces_are_only_names(whole, tmp_path):
    import torch

    odd = ("odd.{}.0.{x}.weight", torch.ones(1))
    report = inspect_checkpoint(copy_with(whole, tmp_path / "model", more=[odd]))
    assert odd[0] in [group.name for group in report.groups]
    assert report.unexpected == (odd[0],)


def test_number_ranges():
    assert number_ranges([5, 0, 1, 2]) == "0-2,5"
    assert number_ranges([]) == ""


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_every_tensor_has_a_part(prefix):
    config = tiny_config(mlp_layer_types=["dense"] + ["sparse"] * 5)
    assert "other" not in {part_of(name) for name in tensor_shapes(config, prefix)}
