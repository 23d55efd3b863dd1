import weakref

import pytest
import torch
from tests.moe.nvfp4_layers import (
    CPU,
    PREFIX,
    exact_rows,
    fill,
    inputs,
    load,
    make_layer,
    one_by_one,
    relative_error,
    routed_rows,
)
from tests.ops.accuracy import randn

from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError
from musespark.moe.block import CompressedMoE
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.moe.experts.build import build_experts
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.moe.experts.part import ExpertPart
from musespark.ops.bf16_grouped_gemm_hopper import HopperBF16Experts
from musespark.ops.nvfp4_hopper import HopperNVFP4Experts
from musespark.ops.triton_import import IS_INTERPRETED
from musespark.parallel.layout import Layout
from musespark.parallel.mesh import Mesh, MeshAxis
from musespark.testing import tiny_config

TOLERANCE = {torch.bfloat16: 6e-3, torch.float32: 1e-6, torch.float64: 1e-7}


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_rows_equal_float64_with_gate_and_up_scales_ten_times_apart(dtype, pack, tokens):
    layer = make_layer(gate_over_up=10.0)
    h, routing = inputs(layer, tokens, dtype=dtype)
    output = load(layer, dtype=dtype, pack=pack)(h, routing)
    assert output.rows.dtype == dtype
    assert relative_error(routed_rows(output), exact_rows(layer, h, routing)) < TOLERANCE[dtype]


def test_bfloat16_is_as_close_as_bfloat16_experts_on_the_same_weights():
    layer = make_layer()
    h, routing = inputs(layer, 50, dtype=torch.bfloat16)
    exact = exact_rows(layer, h, routing)
    gate_up, down = layer.weights()
    plain = {
        f"{PREFIX}gate_up_proj": gate_up,
        f"{PREFIX}down_proj": down,
        f"{PREFIX}post_expert_norm.weight": layer.tensors[f"{PREFIX}post_expert_norm.weight"],
    }
    rounded = GroupedExperts(layer.config, dtype=torch.bfloat16, device=CPU)
    for slot in rounded.weight_slots(PREFIX, plain.__contains__):
        slot.store(plain[slot.name][slot.index] if slot.index else plain[slot.name])
    error = relative_error(routed_rows(load(layer, dtype=torch.bfloat16)(h, routing)), exact)
    # Those round their weights once more; these round in the same places otherwise.
    assert error < 1.05 * relative_error(routed_rows(rounded(h, routing)), exact)


def test_one_scale_for_gate_and_up_would_show():
    layer = make_layer()
    h, routing = inputs(layer, 20)
    exact = exact_rows(layer, h, routing)
    scale_2 = layer.tensors[f"{PREFIX}gate_up_proj_weight_scale_2"]
    scale_2[:] = scale_2[:, :1].clone()
    assert relative_error(routed_rows(load(layer)(h, routing)), exact) > 0.5


def test_routes_without_an_expert_have_no_row():
    layer = make_layer()
    h, routing = inputs(layer, 6, absent=[(0, 0), (3, 0), (3, 1), (5, 1)])
    output = load(layer)(h, routing)
    assert output.rows.shape[0] == 6 * 2 - 4
    assert relative_error(routed_rows(output), exact_rows(layer, h, routing)) < 1e-6


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("kind", [NVFP4Experts, NVFP4W4A4Experts])
def test_no_routes_at_all(kind, tokens):
    layer = make_layer()
    h, routing = inputs(layer, tokens, absent=[(t, k) for t in range(tokens) for k in range(2)])
    output = load(layer, kind)(h, routing)
    assert output.rows.shape == (0, layer.config.moe_hidden_size)
    assert (output.route_index == -1).all()


@pytest.mark.parametrize("kind", [NVFP4Experts, NVFP4W4A4Experts])
def test_experts_stored_one_by_one_are_the_same_experts(kind):
    layer = make_layer(input_scales=(0.01, 0.02))
    h, routing = inputs(layer, 9)
    stacked = load(layer, kind)(h, routing)
    split = load(layer, kind, tensors=one_by_one(layer))(h, routing)
    assert torch.equal(stacked.rows, split.rows)


def test_a_rank_keeps_its_share_only():
    layer = make_layer(moe_intermediate_size=64)

    def weight_bytes(mesh):
        experts = load(layer, mesh=mesh, pack=False)
        return sum(
            getattr(experts, name).numel()
            for name in ("gate_up_proj", "down_proj", "gate_up_proj_weight_scale")
        )

    whole = weight_bytes(None)
    assert weight_bytes(Mesh(tensor=MeshAxis(1, 4))) * 4 == whole
    assert weight_bytes(Mesh(expert=MeshAxis(3, 4))) * 4 == whole
    # With expert parallelism on, experts stay whole whatever the tensor-parallel size.
    both = Mesh(tensor=MeshAxis(1, 2), expert=MeshAxis(1, 2))
    assert weight_bytes(both) * 2 == whole


def test_all_ranks_use_the_largest_input_scale_of_all_experts():
    layer = make_layer()
    layer.tensors[f"{PREFIX}gate_up_proj_input_scale"] = torch.arange(1.0, 17.0).view(8, 2) / 100
    layer.tensors[f"{PREFIX}down_proj_input_scale"] = torch.arange(8.0, 0.0, -1.0) / 50
    for tensors in (layer.tensors, one_by_one(layer)):
        for rank in range(2):
            mesh = Mesh(expert=MeshAxis(rank, 2))
            experts = load(layer, NVFP4W4A4Experts, mesh=mesh, tensors=tensors)
            assert experts.input_scale.item() == pytest.approx(0.16)
            assert experts.inner_scale.item() == pytest.approx(0.16)


def test_a_cut_inside_a_group_is_refused():
    config = tiny_config(moe_intermediate_size=48)
    part = ExpertPart.of(config, Mesh(tensor=MeshAxis(0, 2)))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .* shares of 24, which end"):
        NVFP4Experts(config, dtype=torch.float32, device=CPU, part=part)


@pytest.mark.parametrize("name", ["moe_hidden_size", "moe_intermediate_size"])
def test_widths_without_whole_groups_are_refused(name):
    config = tiny_config(**{name: 40})
    with pytest.raises(ConfigError, match=f"{name}: NVFP4 has one scale per 16 inputs"):
        NVFP4Experts(config, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("axis", "sizes", "message"),
    [
        ("expert", {"num_local_experts": 8}, r"num_local_experts \(8\) .* into 3 equal shares"),
        ("tensor", {"moe_intermediate_size": 32}, r"moe_intermediate_size \(32\) .* 3 equal"),
    ],
)
def test_unequal_shares_are_refused(axis, sizes, message):
    with pytest.raises(ConfigError, match=message):
        ExpertPart.of(tiny_config(**sizes), Mesh(**{axis: MeshAxis(0, 3)}))


def test_memory_stays_at_the_packed_size():
    layer = make_layer(num_local_experts=4, moe_hidden_size=256, moe_intermediate_size=128)
    experts = load(layer, dtype=torch.bfloat16, pack=False)
    storages = {
        name: getattr(experts, name).untyped_storage().data_ptr()
        for name in ("gate_up_proj", "down_proj")
    }
    held = {name: getattr(experts, name) for name in storages}
    experts.pack()
    assert experts.gate_up_proj is None
    for name, tensor in held.items():
        assert tensor.untyped_storage().data_ptr() == storages[name]
    packed = 4 * 3 * 256 * 128
    kept = sum(p.numel() * p.element_size() for p in experts.parameters())
    assert kept < packed / 100  # the rest lives on in the rearranged bytes, and nowhere else
    h, routing = inputs(layer, 3, dtype=torch.bfloat16)
    assert experts(h, routing).rows.count_nonzero() > 0
    for tensor in held.values():
        tensor.zero_()
    assert experts(h, routing).rows.count_nonzero() == 0


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("tokens", [1, 5])
def test_on_hopper_the_pooler_writes_columns_in_the_kernel_s_order(tokens, monkeypatch):
    monkeypatch.setattr("musespark.moe.experts.nvfp4.runs_on", lambda *_: True)
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    widths = {"moe_hidden_size": 256, "moe_intermediate_size": 128}
    layer = make_layer(num_local_experts=4, quantization_config=quantization, **widths)
    block = CompressedMoE(layer.config, 0, dtype=torch.bfloat16, device=CPU)
    fill(block.experts, layer.tensors)
    for seed, name in enumerate(("gate", "pre_expert_proj", "post_expert_proj")):
        weight = block.get_parameter(f"{name}.weight").data
        weight.copy_(randn(*weight.shape, seed=seed, scale=0.1))
    block.gate.e_score_correction_bias.data.zero_()
    block.pre_expert_norm.weight.data.copy_(randn(256, seed=4, scale=0.3))
    block.pre_expert_norm.finish_loading()
    hidden = randn(tokens, 64, dtype=torch.bfloat16, seed=5)
    plain = block(hidden)
    for module in (block, block.experts):
        module.pack()
    assert relative_error(block(hidden).double(), plain.double()) < 1.5e-2


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
def test_a_rank_with_some_experts_expects_its_share_of_the_rows(kind, monkeypatch):
    """Tokens choose among all experts, so those here get no more rows each than on one rank."""
    monkeypatch.setattr(f"musespark.moe.experts.{kind}.runs_on", lambda *_: True)
    monkeypatch.setattr("musespark.moe.experts.bf16.are_small", lambda *_: False)
    layer = make_layer(num_local_experts=8, moe_hidden_size=128, moe_intermediate_size=128)
    packed = []
    for mesh in (None, Mesh(expert=MeshAxis(1, 4))):
        part = ExpertPart.of(layer.config, mesh or Mesh())
        made = NVFP4Experts if kind == "nvfp4" else GroupedExperts
        experts = made(layer.config, dtype=torch.bfloat16, device=CPU, part=part)
        if isinstance(experts, NVFP4Experts):
            fill(experts, layer.tensors)
        experts.pack()
        assert isinstance(experts._on_gpu, HopperNVFP4Experts | HopperBF16Experts)
        assert experts._on_gpu.num_experts == part.num_experts_here
        packed.append(experts._on_gpu)
    whole, cut = packed
    for rows_each in (1, 10, 50, 60, 1000):
        assert cut.choose_tiling(8 * rows_each) == whole.choose_tiling(8 * rows_each)
    assert whole.choose_tiling(8) != whole.choose_tiling(8 * 1000)


def test_build_chooses_by_layer_and_backend():
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["model.layers.1.mlp.experts*"],
    }
    config = tiny_config(quantization_config=quantization)

    def build(layer, backend="auto"):
        layout = Layout(Parallelism(moe_backend=backend))
        return build_experts(config, layer, dtype=torch.float32, device=CPU, layout=layout)

    assert type(build(0)) is NVFP4Experts
    assert type(build(0, "w4a4")) is NVFP4W4A4Experts
    assert type(build(1)) is type(build(1, "w4a4")) is GroupedExperts
    for layer in (0, 1):
        plain = build(layer, "reference")
        plain.pack()
        assert plain.gate_up_proj is not None


def test_slots_cover_the_table_of_the_format():
    layer = make_layer()
    assert fill(NVFP4Experts(layer.config, dtype=torch.float32, device=CPU), layer.tensors) == set(
        layer.tensors
    )
    split = one_by_one(layer)
    assert fill(NVFP4Experts(layer.config, dtype=torch.float32, device=CPU), split) == set(split)


def test_packing_bf16_experts_frees_their_plain_weights():
    experts = GroupedExperts(
        tiny_config(moe_hidden_size=512, moe_intermediate_size=512),
        dtype=torch.bfloat16,
        device=CPU,
    )
    assert experts.gate_up_proj is not None
    plain = weakref.ref(experts.gate_up_proj)
    experts.pack()
    assert (plain() is None) == (experts.gate_up_proj is None)
