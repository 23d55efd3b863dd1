"""Each rank reads its own part of a checkpoint, and not a byte more."""

from typing import Any

import pytest
import torch

from musespark import load_decoder
from musespark.checkpoint.load import load_weights
from musespark.checkpoint.names import find_prefix
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.write import CheckpointWriter
from musespark.config.model import DecoderConfig
from musespark.config.parallel import Parallelism
from musespark.errors import CheckpointError, ConfigError
from musespark.llm.loading import whole_embedding
from musespark.model.decoder import Decoder
from musespark.parallel.layout import Layout
from musespark.parallel.mesh import place_on_mesh
from musespark.testing import make_checkpoint

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "tp2-ep2": {"tensor_parallel_size": 2, "expert_parallel": True},
    "pp3": {"pipeline_parallel_size": 3},
    "pp2-tp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "dp2-ep2": {"data_parallel_size": 2, "expert_parallel": True, "moe_backend": "all_to_all"},
    "dp2": {"data_parallel_size": 2},
}
ROWS = ("q_proj", "gate_proj", "o_proj", "embed_tokens", "lm_head", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    options: dict[str, Any] = {
        "num_attention_heads": 8,
        "moe_hidden_size": 256,
        "moe_intermediate_size": 256,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse", "sparse"],
    }
    plain = make_checkpoint(folder / "plain", **options)
    quantize_checkpoint(plain, folder / "nvfp4")
    make_checkpoint(folder / "apart", per_expert=True, **options)
    return {name: folder / name for name in ("plain", "nvfp4", "apart")}


def load_part(folder, settings, rank):
    """(the rank's report, bytes that its reader read, names of the tensors it took a part of)."""
    parallelism = Parallelism(**settings)
    layout = Layout(parallelism, place_on_mesh(parallelism, rank))
    config = DecoderConfig.from_folder(folder)
    decoder = Decoder(config, dtype=torch.float32, layout=layout)
    with CheckpointReader.open(folder) as reader:
        slots = list(decoder.weight_slots(find_prefix(reader), reader.__contains__))
        report = load_weights(slots, reader, elsewhere=lambda _: True)
        return report.num_bytes, reader.bytes_read, {slot.name for slot in slots}


def needed_bytes(folder, settings, rank):
    """By the rules: what is whole on a rank, what is cut over which axis, and what is elsewhere."""
    parallelism = Parallelism(**settings)
    config = DecoderConfig.from_folder(folder)
    mesh = place_on_mesh(parallelism, rank)
    here = parallelism.layers_of_stage(config.num_hidden_layers, mesh.pipeline.rank)
    total = 0
    with CheckpointReader.open(folder) as reader:
        for name in reader.names():
            if _stage_has(name, here, mesh.pipeline):
                total += reader.info(name).num_bytes // _share(name, config, parallelism, mesh)
    return total


def _stage_has(name, here, pipeline):
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]) in here
    return pipeline.rank == (0 if "embed_tokens" in name else pipeline.size - 1)


def _share(name, config, parallelism, mesh):
    """The part of a tensor that a rank holds is one in so many; 10**9: none of it."""
    tensor, leaf = mesh.tensor.size, name.removesuffix(".weight").split(".")[-1]
    if ".experts." in name:
        if leaf.endswith("input_scale") or "norm" in leaf:
            return 1
        apart = name.split(".experts.")[1].split(".")[0]
        if parallelism.expert_parallel:
            if not apart.isdigit():
                return mesh.expert.size
            per_rank = config.num_local_experts // mesh.expert.size
            return 1 if int(apart) // per_rank == mesh.expert.rank else 10**9
        return 1 if leaf.endswith("weight_scale_2") else tensor
    if leaf in ("k_proj", "v_proj"):
        return min(tensor, config.num_key_value_heads)
    return tensor if leaf in ROWS else 1


@pytest.mark.parametrize("form", ["plain", "nvfp4", "apart"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_read(folders, form, layout):
    settings, folder = LAYOUTS[layout], folders[form]
    world = Parallelism(**settings).world_size
    names = set()
    for rank in range(world):
        stored, read, taken = load_part(folder, settings, rank)
        assert stored == read == needed_bytes(folder, settings, rank)
        names |= taken
    with CheckpointReader.open(folder) as reader:
        assert names == set(reader.names())
        whole = sum(reader.info(name).num_bytes for name in reader.names())
    if layout in ("one", "dp2"):
        assert read == whole
    elif layout == "pp3":
        pass
    else:
        assert read < whole


def test_stages_together_read_every_byte_once(folders):
    parts = [load_part(folders["plain"], LAYOUTS["pp3"], rank)[1] for rank in range(3)]
    with CheckpointReader.open(folders["plain"]) as reader:
        assert sum(parts) == sum(reader.info(name).num_bytes for name in reader.names())


def test_a_tensor_that_no_rank_wants_is_still_an_error(folders, tmp_path):
    config = DecoderConfig.from_folder(folders["plain"])
    with (
        CheckpointReader.open(folders["plain"]) as reader,
        CheckpointWriter(tmp_path / "more") as writer,
    ):
        writer.write_json("config.json", config.to_dict())
        for name in reader.names():
            writer.add(name, reader.read(name))
        writer.add("model.language_model.layers.5.mlp.extra.weight", torch.ones(2))
    parallelism = Parallelism(pipeline_parallel_size=2)
    for rank in range(2):
        with pytest.raises(CheckpointError, match=r"layers\.5\.mlp\.extra\.weight"):
            load_decoder(
                tmp_path / "more", parallelism=parallelism, mesh=place_on_mesh(parallelism, rank)
            )


@pytest.mark.parametrize("layout", ["one", "tp2", "pp3"])
def test_a_draft_finds_the_whole_embedding_on_the_driver(folders, layout):
    folder, parallelism = folders["plain"], Parallelism(**LAYOUTS[layout])
    meshes = [place_on_mesh(parallelism, rank) for rank in range(parallelism.world_size)]
    (driver,) = [mesh for mesh in meshes if mesh.is_driver]
    decoder = load_decoder(folder, dtype="float32", parallelism=parallelism, mesh=driver)
    with CheckpointReader.open(folder) as reader:
        table = reader.read(f"{find_prefix(reader)}embed_tokens.weight").float()
    found = whole_embedding(decoder, folder)
    assert torch.equal(found, table)
    if layout == "one":
        assert any(found is parameter for parameter in decoder.parameters())


def test_a_process_without_a_place_on_the_mesh(folders):
    with pytest.raises(ConfigError, match=r"parallelism: the sizes make 2 processes.*build_mesh"):
        load_decoder(folders["plain"], parallelism=Parallelism(tensor_parallel_size=2))
