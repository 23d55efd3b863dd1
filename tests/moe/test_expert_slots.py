"""Experts from files: stacked or one by one, all of them or one rank's share."""

import pytest
import torch
from tests.moe.nvfp4_layers import CPU, PREFIX, inputs, make_layer, one_by_one, routed_rows

from musespark.checkpoint.load import load_weights
from musespark.checkpoint.shards import CheckpointReader
from musespark.checkpoint.write import CheckpointWriter
from musespark.errors import CheckpointError
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.part import ExpertPart
from musespark.parallel.mesh import SINGLE_PROCESS, Mesh, MeshAxis

SIZES = {"moe_intermediate_size": 64, "moe_hidden_size": 48}
LAYER = make_layer(**SIZES)


def plain_tensors():
    """The same experts in float64, without a scale."""
    gate_up, down = LAYER.weights()
    norm = f"{PREFIX}post_expert_norm.weight"
    return {
        f"{PREFIX}gate_up_proj": gate_up,
        f"{PREFIX}down_proj": down,
        norm: LAYER.tensors[norm],
    }


def split(tensors):
    return one_by_one(type(LAYER)(LAYER.config, tensors))


FILES = {
    (GroupedExperts, "stacked"): plain_tensors(),
    (GroupedExperts, "one by one"): split(plain_tensors()),
    (NVFP4Experts, "stacked"): LAYER.tensors,
    (NVFP4Experts, "one by one"): split(LAYER.tensors),
}


@pytest.fixture(params=list(FILES), ids=lambda key: f"{key[0].__name__}, {key[1]}")
def stored(request, tmp_path):
    """(kind of experts, folder that holds them)."""
    kind, form = request.param
    with CheckpointWriter(tmp_path / "model") as writer:
        for name, tensor in FILES[kind, form].items():
            writer.add(name, tensor.contiguous())
    return kind, tmp_path / "model"


def load_share(kind, folder, mesh=SINGLE_PROCESS, elsewhere=None):
    """The share of one rank, and how many bytes it read."""
    part = ExpertPart.of(LAYER.config, mesh)
    experts = kind(LAYER.config, dtype=torch.float64, device=CPU, part=part)
    with CheckpointReader.open(folder) as reader:
        slots = list(experts.weight_slots(PREFIX, reader.__contains__))
        report = load_weights(slots, reader, elsewhere=elsewhere)
        assert reader.bytes_read == report.num_bytes
    experts.post_expert_norm.finish_loading()
    if isinstance(experts, NVFP4Experts):
        experts.finish_loading()
    return experts, report.num_bytes


def is_expert_key(name):
    return name.startswith(PREFIX)


def test_all_on_one_rank(stored):
    kind, folder = stored
    experts, _ = load_share(kind, folder)
    h, routing = inputs(LAYER, 9, dtype=torch.float64)
    gate_up, down = LAYER.weights()
    found = routed_rows(experts(h, routing))
    for token, chosen in enumerate(routing.ids.tolist()):
        for slot, expert in enumerate(chosen):
            gate, up = (gate_up[expert] @ h[token]).chunk(2)
            expected = down[expert] @ (gate * gate.sigmoid() * up)
            assert (found[token, slot] - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("axis", ["tensor", "expert"])
@pytest.mark.parametrize("size", [2, 4])
def test_shares_add_up_and_each_reads_its_own(stored, axis, size):
    kind, folder = stored
    h, routing = inputs(LAYER, 9, dtype=torch.float64, absent=[(2, 0)])
    whole, whole_bytes = load_share(kind, folder)
    expected = routed_rows(whole(h, routing))
    total, total_bytes = torch.zeros_like(expected), 0
    for rank in range(size):
        mesh = Mesh(**{axis: MeshAxis(rank, size)})
        experts, num_bytes = load_share(kind, folder, mesh, elsewhere=is_expert_key)
        assert experts.part.gives_partial_sums == (axis == "tensor")
        total += routed_rows(experts(h, routing)).nan_to_num()
        total_bytes += num_bytes
        assert num_bytes < 0.6 * whole_bytes if size == 2 else num_bytes < 0.35 * whole_bytes
    assert (total - expected.nan_to_num()).norm() < 1e-7 * expected.nan_to_num().norm()
    # Beyond their shares, ranks read only norms and scales of one number each.
    assert total_bytes < 1.2 * whole_bytes


def test_a_missing_tensor_is_named(stored):
    kind, folder = stored
    with CheckpointReader.open(folder) as reader:
        tensors = {name: reader.read(name).clone() for name in reader}
    lost = next(name for name in sorted(tensors) if "down_proj" in name)
    del tensors[lost]
    with CheckpointWriter(folder.parent / "less") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        load_share(kind, folder.parent / "less")


def test_a_bf16_checkpoint_does_not_pass_for_nvfp4(tmp_path):
    with CheckpointWriter(tmp_path / "plain") as writer:
        for name, tensor in plain_tensors().items():
            writer.add(name, tensor)
    with pytest.raises(CheckpointError) as caught:
        load_share(NVFP4Experts, tmp_path / "plain")
    message = str(caught.value)
    assert "gate_up_proj: dtype float64, but it must be uint8" in message
    assert "down_proj_weight_scale_2" in message


def test_expert_parallelism_leaves_experts_whole():
    mesh = Mesh(tensor=MeshAxis(1, 2), expert=MeshAxis(3, 4))
    part = ExpertPart.of(LAYER.config, mesh)
    assert (part.num_experts_here, part.first_expert, part.inner_size) == (2, 6, 64)
    assert not part.gives_partial_sums
    assert ExpertPart.whole(LAYER.config).first_expert is None
