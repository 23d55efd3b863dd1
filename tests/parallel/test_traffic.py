"""What ranks say to each other: a layout that gives the right answer must do what it promises."""

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.test_layouts import LAYOUTS

from musespark import load_decoder
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.config.parallel import Parallelism
from musespark.model.batch import ForwardBatch
from musespark.model.residual import ColumnShardedStream
from musespark.parallel import collectives
from musespark.parallel.mesh import build_mesh
from musespark.testing import make_checkpoint

LAYERS = 4  # the second is dense; of the NVFP4 experts, the first and the last layer's are BF16
LENGTHS = (1, 3, 4, 9, 257)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traffic")
    plain = make_checkpoint(
        folder / "plain",
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        moe_hidden_size=256,
        moe_intermediate_size=256,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    )
    quantize_checkpoint(plain, folder / "nvfp4")
    return folder


def traffic(workers, folder, settings):
    """Per length, how often each kind of exchange happens on rank 0; and if it can be recorded."""
    found = workers.run(Parallelism(**settings).world_size, count, settings, str(folder))
    return found[0]


def count(rank, settings, folder):
    parallelism = Parallelism(**settings)
    mesh = build_mesh(parallelism, rank)
    decoder = load_decoder(folder, dtype="float32", parallelism=parallelism, mesh=mesh)
    counts: collections.Counter[str] = collections.Counter()
    originals: dict[tuple[Any, str], Any] = {}

    def watch(owner, name, label):
        original = originals[owner, name] = getattr(owner, name)

        def watched(*args, **kwargs):
            counts[label] += 1
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    watch(dist, "all_reduce", "all_reduce")
    watch(dist, "all_to_all_single", "all_to_all")
    watch(dist, "isend", "send")
    watch(collectives, "_gather_into", "gather")
    watch(collectives, "_reduce_scatter_into", "reduce_scatter")
    watch(ColumnShardedStream, "boundary", "deferred")
    try:
        found = {}
        for length in LENGTHS:
            counts.clear()
            decoder(ForwardBatch.uncached(torch.arange(length) % 128))
            found[length] = dict(counts)
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
    dist.barrier()
    return found


# One all-reduce each for the embedding, every layer's attention and every layer's FFN; the logits
# are gathered once.
SUMS = 1 + 2 * LAYERS


def test_tensor_parallel(workers, folders):
    """Poolers of three layers are gathered for few tokens; unpoolers by the next boundary."""
    for experts in ({}, {"expert_parallel": True}):
        found = traffic(workers, folders / "nvfp4", {"tensor_parallel_size": 2, **experts})
        few = {"all_reduce": SUMS, "gather": 1 + 3 + 3, "deferred": 3}
        assert found == dict.fromkeys(LENGTHS[:-1], few) | {257: {"all_reduce": SUMS, "gather": 1}}


def test_sums_inside_of_kernels(workers, folders):
    """Here the stand-in gathers what kernels on GPUs read from each other's memory.

    For few tokens, only the embedding's sum is a collective of its own.
    """
    for experts in ({}, {"expert_parallel": True}):
        settings = {"tensor_parallel_size": 2, "fuse_all_reduce": True, **experts}
        found = traffic(workers, folders / "nvfp4", settings)
        few = {"all_reduce": 1, "gather": 1 + 3 + 3 + 2 * LAYERS, "deferred": 3}
        assert found == dict.fromkeys(LENGTHS[:-1], few) | {257: {"all_reduce": SUMS, "gather": 1}}


@pytest.mark.parametrize("name", ["sp4", "hybrid"])
def test_sequence_parallel(workers, folders, name):
    """The first two layers need all tokens (BF16 experts, dense), and so does the last.

    Of cut steps: the embedding and the replicated layers sum; the third layer's attention scatters
    its sums, and its experts exchange counts, rows, choices and rows back. The last layer gathers
    before attention and before its experts, and scatters after attention. Then the final norm's
    output is gathered, and the logits. Cut rows have no deferred gathers.
    """
    found = traffic(workers, folders / "nvfp4", LAYOUTS[name])
    cut = {
        "all_reduce": 1 + 2 + 2 + 1,
        "reduce_scatter": 2,
        "all_to_all": 4,
        "gather": 1 + 1 + 1 + 1,
    }
    if name == "sp4":
        whole = {"all_reduce": SUMS, "gather": 1}
        assert found[1] == found[3] == whole
        assert found[4] == found[9] == found[257] == cut
    else:
        whole = {"all_reduce": SUMS, "gather": 1 + 3 + 3, "deferred": 3}
        assert found[1] == found[3] == found[4] == whole
        # Experts of the first layer and the last see all nine tokens: few enough for blocks of
        # columns. The first layer's stay blocks until the next boundary.
        assert found[9] == cut | {"gather": 4 + 2 + 2, "deferred": 1}
        assert found[257] == cut


def test_sequence_parallel_from_the_first_layer_on(workers, folders):
    """Without NVFP4 every sparse layer exchanges rows: the stream is cut from layer 0 on."""
    settings = {**LAYOUTS["sp4"], "tensor_parallel_size": 4}
    found = traffic(workers, folders / "plain", settings)
    # The embedding, four attentions and the dense layer scatter; gathered are the inputs of these
    # five, the final norm's output and the logits.
    expected = {"reduce_scatter": 6, "all_to_all": 3 * 4, "gather": 4 + 1 + 1 + 1}
    assert found[4] == found[257] == expected


def test_replicas_exchange_rows_only(workers, folders):
    found = traffic(workers, folders / "nvfp4", LAYOUTS["dp2-ep2"])
    assert found == {length: {"all_to_all": 3 * 4} for length in LENGTHS}


def test_replicas_without_shared_experts_are_silent(workers, folders):
    assert traffic(workers, folders / "plain", LAYOUTS["dp2"]) == {n: {} for n in LENGTHS}


def test_one_message_a_step_between_stages(workers, folders):
    found = traffic(workers, folders / "plain", LAYOUTS["pp2"])
    assert found == {length: {"send": 1} for length in LENGTHS}
