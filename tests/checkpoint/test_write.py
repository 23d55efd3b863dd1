import json
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musespark.checkpoint.header import DTYPES
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.write import CheckpointWriter
from musespark.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors_and_blocks(draw):
    """Named tensors of all dtypes and shapes, and a block to cut out of each."""
    names = draw(st.lists(st.text('ab.é"\\ 1', min_size=1, max_size=6), max_size=6, unique=True))
    items = {}
    for name in names:
        shape, dtype = draw(SHAPES), draw(st.sampled_from(list(DTYPES.values())))
        seed = draw(st.integers(0, 99))
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator)
        block = []
        for size in shape[: draw(st.integers(0, len(shape)))]:
            start = draw(st.integers(0, size))
            block.append(slice(start, draw(st.integers(start, size))))
        items[name] = (tensor.to(dtype), tuple(block))
    return items


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@settings(deadline=None)
@given(items=tensors_and_blocks(), max_shard_bytes=st.sampled_from([None, 1, 50, 400]))
def test_round_trip(items, max_shard_bytes):
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "checkpoint"
        with CheckpointWriter(folder, max_shard_bytes=max_shard_bytes) as writer:
            for name, (tensor, _) in items.items():
                writer.add(name, tensor)
        expected_bytes = 0
        with CheckpointReader.open(folder) as reader:
            assert reader.names() == tuple(sorted(items))
            for name, (tensor, block) in items.items():
                info = reader.info(name)
                assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
                assert info.offset % tensor.element_size() == 0
                read, expected = reader.read(name, block), tensor[block]
                assert (read.shape, read.dtype) == (expected.shape, expected.dtype)
                assert torch.equal(as_bytes(read), as_bytes(expected))
                expected_bytes += expected.numel() * expected.element_size()
            assert reader.bytes_read == expected_bytes


def test_safetensors_reads_what_is_written(tmp_path):
    tensors = {name: torch.ones(3, 5).to(dtype) for name, dtype in DTYPES.items()}
    with CheckpointWriter(tmp_path / "a") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    read = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(as_bytes(read[name]), as_bytes(tensor))
    with safetensors.safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_views_and_transposes_are_written_as_they_look(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.add("whole", base)
        writer.add("transposed", base.T)
        writer.add("part", base[1:3, ::2])
        writer.add("parameter", torch.nn.Parameter(base))
        writer.add("expanded", torch.ones(1, 1).expand(3, 2))
    reader = CheckpointReader.open(tmp_path / "a")
    assert torch.equal(reader.read("transposed"), base.T)
    assert torch.equal(reader.read("part"), base[1:3, ::2])
    assert torch.equal(reader.read("parameter"), base)
    assert torch.equal(reader.read("expanded"), torch.ones(3, 2))


def test_shards_are_filled_up_to_the_limit(tmp_path):
    with CheckpointWriter(tmp_path / "a", max_shard_bytes=100) as writer:
        for index, size in enumerate([60, 40, 1, 500, 100, 99]):
            writer.add(f"t{index}", torch.zeros(size, dtype=torch.uint8))
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 800}
    shard_of = {name: int(file[6:11]) for name, file in index["weight_map"].items()}
    assert shard_of == {"t0": 1, "t1": 1, "t2": 2, "t3": 3, "t4": 4, "t5": 5}
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        *(f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)),
        "model.safetensors.index.json",
    ]


def test_one_shard_needs_no_index(tmp_path):
    with CheckpointWriter(tmp_path / "a", max_shard_bytes=100) as writer:
        writer.add("a", torch.zeros(3))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model.safetensors"]


def test_shards_are_on_disk_as_soon_as_they_are_full(tmp_path):
    """What is held in memory is bounded by the limit, however long the stream."""
    with CheckpointWriter(tmp_path / "a", max_shard_bytes=1000) as writer:
        for index in range(20):
            writer.add(f"t{index}", torch.zeros(900, dtype=torch.uint8))
            (staging,) = tmp_path.iterdir()
            assert len(list(staging.iterdir())) == index


def test_config_and_tokenizer(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "README.md"):
        (source / name).write_text(f"{name} é")
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.write_json("config.json", {"name": "é", "layers": [1, 2]})
        assert writer.copy_tokenizer(source) == ("tokenizer.json", "chat_template.jinja")
        writer.add("a", torch.zeros(3))
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {
        "name": "é",
        "layers": [1, 2],
    }
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "tokenizer.json é"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_nothing_appears_before_the_end(tmp_path):
    folder = tmp_path / "a"
    with CheckpointWriter(folder, max_shard_bytes=1) as writer:
        writer.write_json("config.json", {})
        writer.add("a", torch.zeros(3))
        writer.add("b", torch.zeros(3))
        assert not folder.exists()
        with pytest.raises(CheckpointError, match="no such folder"):
            CheckpointReader.open(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failure_leaves_nothing_behind(tmp_path):
    def write_and_fail():
        with CheckpointWriter(tmp_path / "a", max_shard_bytes=1) as writer:
            writer.add("a", torch.zeros(3))
            writer.add("b", torch.zeros(3))
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_is_no_checkpoint(tmp_path):
    """What a killed process leaves is not under the name asked for, and opens nowhere."""
    writer = CheckpointWriter(tmp_path / "a", max_shard_bytes=1)
    writer.write_json("config.json", {})
    writer.add("a", torch.zeros(3))
    writer.add("b", torch.zeros(3))
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.unfinished-")
    with pytest.raises(CheckpointError, match="no weights there"):
        CheckpointReader.open(left)
    writer.discard()


def test_an_empty_folder_is_filled(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        writer.add("a", torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("only copy")
    with pytest.raises(CheckpointError, match=r"is not empty\. Name a new folder"):
        CheckpointWriter(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointWriter(tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_overwrite_replaces_the_whole_folder(tmp_path):
    folder = tmp_path / "a"
    with CheckpointWriter(folder, max_shard_bytes=1) as writer:
        writer.add("a", torch.zeros(3))
        writer.add("b", torch.zeros(3))
    with CheckpointWriter(folder, overwrite=True) as writer:
        writer.add("c", torch.zeros(3))
        assert CheckpointReader.open(folder).names() == ("a", "b")
    assert CheckpointReader.open(folder).names() == ("c",)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_checkpoint_can_be_rewritten_from_itself(tmp_path):
    folder = tmp_path / "a"
    with CheckpointWriter(folder) as writer:
        writer.add("a", torch.arange(3.0))
    with CheckpointReader.open(folder) as reader, CheckpointWriter(folder, overwrite=True) as out:
        out.add("a", reader.read("a"))
        out.add("b", reader.read("a") + 1)
    rewritten = CheckpointReader.open(folder)
    assert rewritten.read("a").tolist() == [0.0, 1.0, 2.0]
    assert rewritten.read("b").tolist() == [1.0, 2.0, 3.0]


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointWriter(tmp_path / "file" / "a")


def test_mistakes_of_the_caller(tmp_path):
    with CheckpointWriter(tmp_path / "a") as writer:
        writer.add("a", torch.zeros(3))
        with pytest.raises(ValueError, match="'a' is written twice"):
            writer.add("a", torch.zeros(3))
        with pytest.raises(ValueError, match="complex64 has no place"):
            writer.add("b", torch.zeros(3, dtype=torch.complex64))
