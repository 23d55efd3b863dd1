"""The finalizer: every form of rows it takes, and which path takes them."""

import pytest
import torch
from tests.moe.nvfp4_layers import close, finalized_exactly, inputs, load, make_layer, padded

from musespark.moe.experts.base import ExpertOutput
from musespark.moe.finalize import Finalized, Finalizer, KernelPath, ReferencePath
from musespark.moe.runner import MoERunner
from musespark.ops import expert_finalize as finalize_op


def make_runner(dtype=torch.float32, **options):
    layer = make_layer(input_scales=(1.6e-3, 1e-2))
    experts = load(layer, dtype=dtype)
    return layer, experts, MoERunner(experts, Finalizer(experts.post_expert_norm, **options))


def test_no_tokens_on_any_path():
    layer, experts, _ = make_runner()
    output = experts(*inputs(layer, 0))
    for options in ({}, {"variance_size": 8}, {"row_reduce": lambda rows: rows}):
        finalized = Finalizer(experts.post_expert_norm, **options)(output)
        assert finalized.hidden_states.shape == (0, layer.config.moe_hidden_size)


@pytest.mark.parametrize("absent", [[], [(0, 1), (5, 0), (5, 1)]])
def test_route_major_permuted_and_padded_rows_agree_bit_for_bit(absent):
    layer, experts, _ = make_runner(dtype=torch.bfloat16)
    finalize = Finalizer(experts.post_expert_norm)
    output = experts(*inputs(layer, 8, dtype=torch.bfloat16, absent=absent))
    assert not output.route_major
    expected = finalize(output).hidden_states
    route_major = output.to_route_major()
    assert route_major.route_major
    assert route_major.to_route_major() is route_major
    assert route_major.rows.shape[0] == 8 * 2
    own = torch.arange(16).view(8, 2)
    assert torch.equal(route_major.route_index, own.masked_fill(output.route_index < 0, -1))
    assert torch.equal(finalize(route_major).hidden_states, expected)
    with_nan = padded(output)
    assert with_nan.rows.shape[0] > output.rows.shape[0]
    assert torch.equal(finalize(with_nan).hidden_states, expected)
    if absent:  # the memory of an absent route's own row may hold anything
        route_major.rows[(route_major.route_index < 0).flatten()] = torch.nan
        assert torch.equal(finalize(route_major).hidden_states, expected)


def test_reference_and_kernel_agree_bit_for_bit():
    layer, experts, _ = make_runner(dtype=torch.bfloat16)
    output = padded(experts(*inputs(layer, 8, dtype=torch.bfloat16, absent=[(1, 1)])))
    norm = experts.post_expert_norm
    assert torch.equal(
        ReferencePath(norm)(output).hidden_states, KernelPath(norm)(output).hidden_states
    )


@pytest.mark.parametrize("elements", [1, 500, 10**9])
def test_chunks_change_nothing(monkeypatch, elements):
    layer, _, runner = make_runner(dtype=torch.bfloat16)
    h, routing = inputs(layer, 23, dtype=torch.bfloat16, absent=[(0, 0)])
    expected = runner(h, routing)
    monkeypatch.setattr(finalize_op, "_CHUNK_ELEMENTS", elements)
    assert torch.equal(runner(h, routing), expected)


def test_chunk_sizes():
    assert finalize_op.tokens_per_chunk(8, 4096) == 1024
    assert finalize_op.tokens_per_chunk(8, 2**30) == 1


def test_variance_over_fewer_elements_than_the_row():
    layer, _, runner = make_runner(variance_size=16)
    h, routing = inputs(layer, 9)
    assert close(runner(h, routing), finalized_exactly(layer, h, routing, variance_size=16))


class TestChoice:
    """Which path takes a batch."""

    def output(self, *, route_major):
        layer, experts, _ = make_runner()
        output = experts(*inputs(layer, 4))
        self.norm = experts.post_expert_norm
        return output.to_route_major() if route_major else output

    @pytest.mark.parametrize(
        ("route_major", "options", "expected"),
        [
            (False, {}, KernelPath),
            (True, {}, KernelPath),
            (True, {"row_reduce": torch.clone}, KernelPath),
            (False, {"row_reduce": torch.clone}, ReferencePath),
            (True, {"variance_size": 8}, ReferencePath),
            (True, {"variance_size": 8, "row_reduce": torch.clone}, ReferencePath),
        ],
    )
    def test_order(self, route_major, options, expected):
        output = self.output(route_major=route_major)
        assert type(Finalizer(self.norm, **options).choose(output)) is expected

    def test_paths_fused_with_a_collective_come_first_where_they_accept(self):
        output = self.output(route_major=False)

        class ForSmallBatches:
            def accepts(self, output: ExpertOutput) -> bool:
                return output.route_index.shape[0] <= 4

            def __call__(self, output: ExpertOutput) -> Finalized:
                return Finalized(output.rows[:4] * 0, is_reduced=True)

        fused = ForSmallBatches()
        finalizer = Finalizer(self.norm, variance_size=8, fused_paths=[fused])
        assert finalizer.choose(output) is fused
        layer, experts, _ = make_runner()
        larger = experts(*inputs(layer, 5))
        assert type(finalizer.choose(larger)) is ReferencePath


def test_no_route_here():
    layer, _, runner = make_runner()
    h, routing = inputs(layer, 3, absent=[(t, k) for t in range(3) for k in range(2)])
    assert torch.equal(runner(h, routing), torch.zeros_like(h))
