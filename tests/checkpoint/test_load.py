import threading
from dataclasses import dataclass, field

import pytest
import torch

from musespark.checkpoint.load import load_weights
from musespark.checkpoint.match import check_slots, fold_names
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.write import CheckpointWriter
from musespark.errors import CheckpointError
from musespark.parallel.shard import WeightSlot, copy_into


@dataclass
class Taken:
    """What slots were given: name -> tensors, copied."""

    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def slot(self, name, shape, **options):
        def store(tensor):
            with self.lock:
                self.tensors.setdefault(name, []).append(tensor.clone())

        return WeightSlot(name, shape, store, **options)


@pytest.fixture
def write(tmp_path):
    def write_and_open(tensors, **options):
        with CheckpointWriter(tmp_path / "checkpoint", **options) as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor)
        return CheckpointReader.open(tmp_path / "checkpoint")

    return write_and_open


# Loading what fits


def test_every_tensor_is_taken_once(write):
    tensors = {f"t{index}": torch.full((index + 1, 3), float(index)) for index in range(40)}
    reader = write(tensors, max_shard_bytes=500)
    taken = Taken()
    report = load_weights([taken.slot(name, tuple(t.shape)) for name, t in tensors.items()], reader)
    assert taken.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        (given,) = taken.tensors[name]
        assert torch.equal(given, tensor)
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert (report.num_tensors, report.num_bytes, report.skipped) == (40, total, ())
    assert reader.bytes_read == total
    assert report.seconds > 0


def test_parameters_are_filled_in_place_and_converted(write):
    reader = write({"a": torch.tensor([1.0, 2.0]).bfloat16(), "b": torch.tensor([3.0, 4.0])})
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2).bfloat16())
    slots = [WeightSlot("a", (2,), copy_into(a)), WeightSlot("b", (2,), copy_into(b))]
    load_weights(slots, reader)
    assert a.tolist() == [1.0, 2.0]
    assert (b.tolist(), b.dtype, b.requires_grad) == ([3.0, 4.0], torch.bfloat16, True)


def test_a_rank_reads_only_its_part(write):
    tensor = torch.arange(8 * 6.0).view(8, 6)
    reader = write({"a": tensor})
    taken = Taken()
    part = (slice(2, 4), slice(0, 3))
    report = load_weights([taken.slot("a", (8, 6), index=part)], reader)
    assert torch.equal(taken.tensors["a"][0], tensor[2:4, :3])
    assert report.num_bytes == reader.bytes_read == 2 * 3 * 4


def test_two_parts_of_one_tensor(write):
    """A rank's gate rows and up rows lie apart in gate_up_proj."""
    tensor = torch.arange(8 * 6.0).view(8, 6)
    reader = write({"a": tensor})
    target = torch.zeros(4, 6)
    slots = [
        WeightSlot("a", (8, 6), copy_into(target[:2]), index=(slice(2, 4),)),
        WeightSlot("a", (8, 6), copy_into(target[2:]), index=(slice(6, 8),)),
    ]
    load_weights(slots, reader)
    assert torch.equal(target, tensor[[2, 3, 6, 7]])


def test_overlapping_slots_are_a_mistake_of_the_caller(write):
    reader = write({"a": torch.zeros(8, 6)})
    taken = Taken()
    one = taken.slot("a", (8, 6), index=(slice(0, 4),))
    for other in (taken.slot("a", (8, 6), index=(slice(3, 8),)), taken.slot("a", (8, 6))):
        with pytest.raises(ValueError, match="same part of 'a'"):
            load_weights([one, other], reader)
    with pytest.raises(ValueError, match="disagree about 'a'"):
        load_weights([one, taken.slot("a", (8, 7), index=(slice(4, 8),))], reader)
    assert reader.bytes_read == 0


def test_keys_of_other_ranks(write):
    reader = write({"experts.0": torch.zeros(1), "experts.1": torch.zeros(1)})
    taken = Taken()
    report = load_weights(
        [taken.slot("experts.0", (1,))], reader, elsewhere=lambda name: name == "experts.1"
    )
    assert report.skipped == ("experts.1",)
    assert reader.bytes_read == 4


def test_towers_are_skipped_and_reported(write):
    reader = write({"a": torch.zeros(1), "model.vision_tower.b": torch.zeros(9)})
    report = load_weights([Taken().slot("a", (1,))], reader)
    assert report.skipped == ("model.vision_tower.b",)
    assert reader.bytes_read == 4


def test_progress_counts_up_to_the_total(write):
    tensors = {f"t{index}": torch.zeros(index + 1) for index in range(20)}
    reader = write(tensors)
    seen = []
    load_weights(
        [Taken().slot(name, tuple(t.shape)) for name, t in tensors.items()],
        reader,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_reads_run_at_once(write):
    reader = write({"a": torch.zeros(1), "b": torch.zeros(1)})
    barrier = threading.Barrier(2, timeout=20)

    def meet(_):
        barrier.wait()

    load_weights([WeightSlot(name, (1,), meet) for name in "ab"], reader, max_workers=2)


def test_a_failing_store_stops_the_load(write):
    tensors = {f"t{index:03d}": torch.zeros(1) for index in range(200)}
    reader = write(tensors)

    def fail(_):
        raise MemoryError("out of memory")

    slots = [WeightSlot(name, (1,), fail) for name in tensors]
    with pytest.raises(MemoryError, match="out of memory"):
        load_weights(slots, reader, max_workers=1)
    assert reader.bytes_read == 4


def test_nothing_to_load(write):
    assert load_weights([], write({})).num_tensors == 0


# One error for all that does not fit


def misfit(slots, reader):
    with pytest.raises(CheckpointError) as caught:
        load_weights(slots, reader)
    assert reader.bytes_read == 0
    return str(caught.value)


def test_all_that_does_not_fit_is_in_one_error(write):
    reader = write(
        {
            "layers.0.norm.weight": torch.zeros(4),
            "layers.0.q_proj.wieght": torch.zeros(4, 4),
            "layers.0.o_proj.weight": torch.zeros(4, 5),
            "layers.0.gate": torch.zeros(4, dtype=torch.uint8),
            "extra": torch.zeros(1),
        }
    )
    taken = Taken()
    message = misfit(
        [
            taken.slot("layers.0.norm.weight", (4,)),
            taken.slot("layers.0.q_proj.weight", (4, 4)),
            taken.slot("layers.0.o_proj.weight", (4, 4)),
            taken.slot("layers.0.gate", (4,)),
            taken.slot("lm_head.weight", (9, 4)),
        ],
        reader,
    )
    assert message.splitlines() == [
        f"{reader.folder}: the weights do not fit the model of its config.json: "
        "2 missing, 2 unexpected, 1 wrongly shaped, 1 wrongly typed.",
        "Missing (2):",
        "  layers.0.q_proj.weight; is 'layers.0.q_proj.wieght' (model.safetensors) meant?",
        "  lm_head.weight",
        "Unexpected (2):",
        "  extra",
        "  layers.0.q_proj.wieght",
        "Wrongly shaped (1):",
        "  layers.0.o_proj.weight: shape [4, 5], but the config makes it [4, 4]",
        "Wrongly typed (1):",
        "  layers.0.gate: dtype uint8, but it must be bfloat16 or float16 or float32 or float64",
        "To fix: use the config.json and the weights of one and the same save, under the names "
        "that transformers' MuseSparkForConditionalGeneration.save_pretrained writes.",
    ]
    assert taken.tensors == {}


def test_families_of_alike_names_are_folded(write):
    reader = write({"a": torch.zeros(1)})
    names = [f"layers.{i}.{p}.weight" for i in range(62) for p in ("q_proj", "k_proj")]
    names += [f"layers.{i}.experts.{e}.up.weight" for i in (3, 4, 7, 9) for e in range(256)]
    message = misfit([Taken().slot(name, (1,)) for name in ["a", *names]], reader)
    assert "Missing (1148):" in message
    assert "  layers.{0-61}.q_proj.weight (62 tensors)\n" in message
    assert "  layers.{0-61}.k_proj.weight (62 tensors)\n" in message
    assert "  layers.{3-4,7,9}.experts.{0-255}.up.weight (1024 tensors)\n" in message


def test_very_long_lists_are_cut_with_a_count(write):
    reader = write({f"some.{chr(97 + i % 26)}{i}.x": torch.zeros(1) for i in range(100)})
    message = misfit([], reader)
    assert "Unexpected (100):" in message
    assert "  ... and 76 more lines like these" in message
    assert len(message.splitlines()) == 28


def test_wrong_shapes_of_many_layers_are_one_line(write):
    reader = write({f"layers.{i}.norm.weight": torch.zeros(4) for i in range(10)})
    message = misfit([Taken().slot(f"layers.{i}.norm.weight", (8,)) for i in range(10)], reader)
    line = "  layers.{0-9}.norm.weight (10 tensors): shape [4], but the config makes it [8]"
    assert line in message.splitlines()
    assert message.endswith("To fix: use the config.json that was saved with these weights.")


def test_wrong_dtypes_alone(write):
    reader = write({"a": torch.zeros(1, dtype=torch.int64)})
    message = misfit([Taken().slot("a", (1,), dtypes=(torch.float32,))], reader)
    assert "a: dtype int64, but it must be float32" in message
    assert "convert the tensors named above" in message


def test_text_model_without_a_head(write):
    reader = write({"embed_tokens.weight": torch.zeros(1)})
    taken = Taken()
    slots = [taken.slot("embed_tokens.weight", (1,)), taken.slot("lm_head.weight", (1,))]
    assert "MuseSparkTextModel saved alone has no output projection" in misfit(slots, reader)


def test_check_slots_reads_nothing(write):
    reader = write({"a": torch.zeros(4)})
    assert check_slots([Taken().slot("a", (4,))], reader) == []
    assert reader.bytes_read == 0


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["b", "a"], [("a", 1), ("b", 1)]),
        (["l.10.w", "l.9.w", "l.1.w"], [("l.1.w", 1), ("l.9.w", 1), ("l.10.w", 1)]),
        ([f"l.{i}.w" for i in (0, 1, 2, 4, 6)], [("l.{0-2,4,6}.w", 5)]),
        (
            [f"l.{i}.e.{e}.w" for i in range(2) for e in range(3)],
            [("l.{0-1}.e.{0-2}.w", 6)],
        ),
        (
            [f"l.{i}.e.{e}.w" for i in range(2) for e in range(5 + i)],
            [("l.0.e.{0-4}.w", 5), ("l.1.e.{0-5}.w", 6)],
        ),
    ],
)
def test_fold_names(names, expected):
    assert fold_names(names) == expected
