import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.safetensors_by_hand import entry, file_bytes, write_index

from musespark.checkpoint.header import DTYPES
from musespark.checkpoint.shards import CheckpointReader
from musespark.errors import CheckpointError

ONE_FLOAT = {"a": entry("F32", [1], 0, 4)}


def error_of(folder):
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader.open(folder)
    return str(caught.value)


def error_of_file(folder, content):
    path = folder / "model.safetensors"
    path.write_bytes(content)
    message = error_of(folder)
    assert message.startswith(str(path))
    return message


def shards(folder, **tensors_of):
    """Shards `one`, `two`, ... with a float each, and an index of these."""
    weight_map: dict[str, str] = {}
    for shard, names in tensors_of.items():
        file_name = f"model-{shard}.safetensors"
        safetensors.torch.save_file(
            {name: torch.zeros(1) for name in names}, folder / file_name, {"format": "pt"}
        )
        weight_map |= dict.fromkeys(names, file_name)
    write_index(folder, weight_map)
    return weight_map


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


# Reading what is right


def test_reads_what_safetensors_writes(tmp_path):
    tensors = {
        name: (torch.arange(24) % 2).view(2, 3, 4).to(dtype) for name, dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.names() == tuple(sorted(tensors)) == tuple(reader)
        assert len(reader) == len(tensors)
        assert "BF16" in reader
        assert "BF17" not in reader
        for name, tensor in tensors.items():
            info = reader.info(name)
            assert (info.name, info.dtype, info.shape) == (name, tensor.dtype, tuple(tensor.shape))
            assert info.num_bytes == tensor.numel() * tensor.element_size()
            assert info.file == tmp_path / "model.safetensors"
            read = reader.read(name)
            assert read.dtype == tensor.dtype
            assert read.shape == tensor.shape
            assert torch.equal(as_bytes(read), as_bytes(tensor))


def test_reads_shards_by_index(tmp_path):
    shards(tmp_path, one=["a", "b"], two=["c"])
    with CheckpointReader.open(str(tmp_path)) as reader:
        assert reader.names() == ("a", "b", "c")
        assert reader.info("c").file.name == "model-two.safetensors"
        assert reader.read("c").tolist() == [0.0]


def test_bytes_read_are_those_of_the_block(tmp_path):
    tensor = torch.arange(6 * 4 * 2, dtype=torch.float32).view(6, 4, 2)
    safetensors.torch.save_file({"a": tensor}, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    assert reader.bytes_read == 0
    assert torch.equal(reader.read("a", (slice(2, 4),)), tensor[2:4])
    assert reader.bytes_read == 2 * 4 * 2 * 4
    block = reader.read("a", (slice(None), slice(1, 3), slice(1, None)))
    assert torch.equal(block, tensor[:, 1:3, 1:])
    assert reader.bytes_read == (2 * 4 * 2 + 6 * 2) * 4
    assert reader.read("a", (slice(3, 3),)).shape == (0, 4, 2)
    assert reader.bytes_read == (2 * 4 * 2 + 6 * 2) * 4


def test_a_block_leaves_the_rest_of_the_file_untouched(tmp_path):
    """Only the header and the wanted rows are looked at, of a file larger than memory."""
    path = tmp_path / "model.safetensors"
    rows, row_bytes = 1 << 16, 1 << 20
    path.write_bytes(
        file_bytes({"a": entry("U8", [rows, row_bytes], 0, rows * row_bytes)}, b"\x07" * row_bytes)
    )
    with path.open("r+b") as file:  # 64 GiB, of which one MiB is on disk
        file.truncate(path.stat().st_size + (rows - 1) * row_bytes)
    reader = CheckpointReader.open(tmp_path)
    assert (reader.read("a", (slice(0, 1),)) == 7).all()
    assert reader.bytes_read == row_bytes


def test_reads_are_views_of_one_map(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(8)}, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    assert reader.read("a").data_ptr() == reader.read("a").data_ptr()


def test_tensors_outlive_the_reader(tmp_path):
    tensor = torch.arange(100_000)
    safetensors.torch.save_file({"a": tensor}, tmp_path / "model.safetensors")
    with CheckpointReader.open(tmp_path) as reader:
        read = reader.read("a")
    del reader
    assert torch.equal(read, tensor)


def test_writing_to_a_tensor_never_reaches_the_file(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(8)}, tmp_path / "model.safetensors")
    CheckpointReader.open(tmp_path).read("a").fill_(1.0)
    assert CheckpointReader.open(tmp_path).read("a").tolist() == [0.0] * 8


def test_a_closed_reader_reads_no_more(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(8)}, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read("a")


def test_many_threads_read_at_once(tmp_path):
    tensors = {str(index): torch.full((1000,), index) for index in range(50)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    reader = CheckpointReader.open(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        names = list(tensors) * 10
        for name, read in zip(names, pool.map(reader.read, names), strict=True):
            assert torch.equal(read, tensors[name])
    assert reader.bytes_read == 10 * 50 * 1000 * 8


def test_data_that_is_not_aligned(tmp_path):
    values = torch.tensor([1.5, -2.5, 3.5])
    header = {"flag": entry("U8", [1], 0, 1), "a": entry("F32", [3], 1, 13)}
    content = file_bytes(header, b"\x01" + values.numpy().tobytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    reader = CheckpointReader.open(tmp_path)
    assert reader.info("a").offset % 4 != 0
    assert torch.equal(reader.read("a"), values)
    assert torch.equal(reader.read("a", (slice(1, 3),)), values[1:3])
    assert reader.read("a").data_ptr() % 4 == 0


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 5),),
        (slice(-1, None),),
        (slice(3, 2),),
        (slice(0, 4, 2),),
        (slice(None), slice(None), slice(0, 1)),
    ],
)
def test_an_impossible_block_is_refused(tmp_path, index):
    safetensors.torch.save_file({"a": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"slices|does not cut"):
        CheckpointReader.open(tmp_path).read("a", index)


def test_unknown_name(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds no tensor named 'b'"):
        CheckpointReader.open(tmp_path).read("b")


# Files that are damaged


@pytest.mark.parametrize("left", [0, 5])
def test_truncated_before_the_header(tmp_path, left):
    message = error_of_file(tmp_path, file_bytes(ONE_FLOAT, b"\0" * 4)[:left])
    assert f"is truncated: {left} bytes" in message
    assert "Download it again." in message


def test_truncated_in_the_header(tmp_path):
    message = error_of_file(tmp_path, file_bytes(ONE_FLOAT, b"\0" * 4)[:20])
    assert "is truncated: the header is " in message
    assert "the file ends after 20" in message


def test_truncated_in_the_data(tmp_path):
    whole = file_bytes(ONE_FLOAT, b"\0" * 4)
    message = error_of_file(tmp_path, whole[:-1])
    assert f"is truncated: {len(whole) - 1} bytes, but its header describes {len(whole)}" in message
    assert "Download it again." in message


CORRUPT = {
    "bytes": (b"\xff{}", "not valid JSON"),
    "json": (b'{"a": ', "not valid JSON"),
    "deep": (b"[" * 200_000, "not valid JSON"),
    "no object": (b"[]", "not a JSON object"),
    "no entry": ({"a": 3}, "tensor 'a' is described by 3"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, "tensor 'a' is described by"),
    "three offsets": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
        "tensor 'a' is described by",
    ),
    "negative shape": ({"a": entry("F32", [-1], 0, 4)}, "tensor 'a' is described by"),
    "shape of text": ({"a": entry("F32", "1", 0, 4)}, "tensor 'a' is described by"),
    "size": ({"a": entry("F32", [2], 0, 4)}, "takes 8 bytes by its shape [2] and dtype F32, but 4"),
    "backwards": ({"a": entry("F32", [1], 4, 0)}, "but -4 by its offsets"),
    "gap": (
        {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)},
        "tensor 'b' leaves a gap after",
    ),
    "overlap": (
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)},
        "tensor 'b' overlaps the tensor before it",
    ),
    "left over": ({"a": entry("U8", [1], 0, 1)}, "3 bytes follow the last tensor"),
    "twice": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        "'a' is listed twice",
    ),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_header(tmp_path, case):
    header, part = CORRUPT[case]
    message = error_of_file(tmp_path, file_bytes(header, b"\0" * 4))
    assert "its header is corrupt: " in message
    assert part in message
    assert message.endswith("Download it again.")


def test_not_a_safetensors_file(tmp_path):
    message = error_of_file(tmp_path, b"PK\x03\x04 a zip archive, as torch.save writes")
    assert "is not a safetensors file, or its start is damaged" in message


def test_git_lfs_pointer(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4\n"
    assert "is a Git LFS pointer" in (message := error_of_file(tmp_path, pointer))
    assert "git lfs pull" in message


def test_dtype_nobody_reads(tmp_path):
    message = error_of_file(tmp_path, file_bytes({"a": entry("F6_E3M2", [4], 0, 3)}, b"\0" * 3))
    assert "tensor 'a' is stored as 'F6_E3M2'" in message
    assert "It reads BOOL, U8" in message


WHOLE = file_bytes({"a": entry("F32", [2], 0, 8), "b": entry("U8", [], 8, 9)}, b"\0" * 9)


@settings(deadline=None, max_examples=300)
@given(
    keep=st.integers(0, len(WHOLE)),
    changes=st.dictionaries(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), max_size=4),
)
def test_any_damage_is_a_clear_error_or_none(keep, changes):
    """Whatever bytes a file holds, it opens with readable tensors or is refused by name."""
    content = bytearray(WHOLE)
    for position, value in changes.items():
        content[position] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content[:keep])
        problem = str(path)
        try:
            reader = CheckpointReader.open(folder)
            for name in reader:
                reader.read(name)
        except CheckpointError as error:
            problem = str(error)
        assert problem.startswith(str(path))


# Folders that do not hang together


def test_missing_shards_are_all_named(tmp_path):
    shards(tmp_path, one=["a"], two=["b"], three=["c"])
    (tmp_path / "model-one.safetensors").unlink()
    (tmp_path / "model-three.safetensors").unlink()
    message = error_of(tmp_path)
    assert "2 of 3 shards" in message
    assert "model-one.safetensors, model-three.safetensors" in message
    assert "Download them again" in message


def test_truncated_shard_is_named(tmp_path):
    shards(tmp_path, one=["a"], two=["b"])
    path = tmp_path / "model-two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert error_of(tmp_path).startswith(f"{path}: is truncated")


def test_index_lists_a_tensor_that_is_nowhere(tmp_path):
    weight_map = shards(tmp_path, one=["a"], two=["b"])
    write_index(tmp_path, weight_map | {"c": "model-two.safetensors"})
    message = error_of(tmp_path)
    assert message.startswith(f"{tmp_path / 'model.safetensors.index.json'}: disagrees")
    assert "'c' is listed for model-two.safetensors, but is in no shard" in message


def test_index_lists_a_tensor_in_the_wrong_shard(tmp_path):
    weight_map = shards(tmp_path, one=["a"], two=["b"])
    write_index(tmp_path, weight_map | {"b": "model-one.safetensors", "a": "model-two.safetensors"})
    message = error_of(tmp_path)
    assert "'b' is listed for model-one.safetensors, but is in model-two.safetensors" in message
    assert "'a' is listed for model-two.safetensors, but is in model-one.safetensors" in message


def test_index_lacks_a_tensor(tmp_path):
    weight_map = shards(tmp_path, one=["a"], two=["b", "c"])
    del weight_map["c"]
    write_index(tmp_path, weight_map)
    assert "'c' is in model-two.safetensors, but not in the index" in error_of(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    shards(tmp_path, one=["a", "b"], two=["b", "c"])
    message = error_of(tmp_path)
    assert "'b' is in two shards, model-one.safetensors and model-two.safetensors" in message
    assert "stem from different saves" in message


def test_many_disagreements_are_counted(tmp_path):
    weight_map = shards(tmp_path, one=["a"])
    write_index(tmp_path, weight_map | {f"t{i}": "model-one.safetensors" for i in range(50)})
    message = error_of(tmp_path)
    assert "; and 30 more" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_damaged_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    message = error_of(tmp_path)
    assert "model.safetensors.index.json: " in message
    assert "Download it again." in message


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", "a/b", "", "..", 3])
def test_index_that_leaves_its_folder(tmp_path, file_name):
    write_index(tmp_path, {"a": file_name})
    message = error_of(tmp_path)
    assert "tensor 'a'" in message
    assert repr(file_name) in message


def test_single_file_beside_an_index(tmp_path):
    shards(tmp_path, one=["a"])
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    message = error_of(tmp_path)
    assert "holds both model.safetensors and model.safetensors.index.json" in message
    assert "delete that one" in message


def test_index_of_a_single_file(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "model.safetensors"})
    assert CheckpointReader.open(tmp_path).names() == ("a",)


# Folders with nothing to read


@pytest.mark.parametrize(
    "file_name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"]
)
def test_pickled_weights_are_not_opened(tmp_path, file_name):
    class Explosive:
        def __reduce__(self):
            return (exec, ("raise AssertionError('unpickled')",))

    torch.save(Explosive(), tmp_path / file_name)
    message = error_of(tmp_path)
    assert f"holds only pickled weights ({file_name})" in message
    assert "nothing is ever unpickled here" in message
    assert "save_pretrained" in message


def test_nothing_there(tmp_path):
    message = error_of(tmp_path)
    assert "no weights there: neither model.safetensors nor model.safetensors.index" in message


def test_no_folder(tmp_path):
    assert error_of(tmp_path / "nowhere").endswith("nowhere: no such folder.")


def test_file_for_a_folder(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    assert "is a file. Give the folder that holds model.safetensors" in error_of(path)


def test_shards_without_an_index(tmp_path):
    shards(tmp_path, one=["a"], two=["b"])
    (tmp_path / "model.safetensors.index.json").unlink()
    message = error_of(tmp_path)
    assert "but model-one.safetensors, model-two.safetensors" in message
    assert "Shards need their index file" in message
