import dataclasses
import threading

import pytest
import torch
from tests.moe.nvfp4_layers import exact_rows, inputs, load, make_layer

from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.base import ExpertOutput
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.moe.finalize import Finalized, Finalizer, KernelPath, ReferencePath
from musespark.moe.runner import MoERunner, PreparedInputs
from musespark.ops import expert_finalize as finalize_op
from musespark.parallel.mesh import Mesh, MeshAxis

KINDS = [NVFP4Experts, NVFP4W4A4Experts]


def make_runner(kind=NVFP4Experts, dtype=torch.float32, layer=None, **options):
    layer = layer or make_layer(input_scales=(1.6e-3, 1e-2))
    experts = load(layer, kind, dtype=dtype)
    return layer, experts, MoERunner(experts, Finalizer(experts.post_expert_norm, **options))


def finalized_exactly(layer, h, routing, variance_size=None):
    """The whole runner in float64."""
    rows = exact_rows(layer, h, routing)
    gain = 1 + layer.tensors["experts.post_expert_norm.weight"].double()
    scaled = rows * gain
    square = scaled[..., :variance_size].square().mean(dim=-1, keepdim=True)
    normed = scaled / (square + layer.config.post_norm_eps).sqrt()
    weighted = normed * routing.weights.double()[..., None]
    return weighted.masked_fill((routing.ids < 0)[..., None], 0).sum(dim=1)


def close(found, exact, tolerance=1e-5):
    return float((found.double() - exact).norm() / exact.norm()) < tolerance


def padded(output, num_extra=5, filler=float("nan")):
    """The same output with extra rows of `filler` between the used ones."""
    order = torch.randperm(
        output.rows.shape[0] + num_extra, generator=torch.Generator().manual_seed(3)
    )
    place = order[: output.rows.shape[0]]
    rows = torch.full((order.shape[0], output.rows.shape[1]), filler, dtype=output.rows.dtype)
    rows[place] = output.rows
    here = output.route_index >= 0
    index = torch.where(here, place[output.route_index.clamp_min(0)], -1)
    return dataclasses.replace(output, rows=rows, route_index=index)


def test_rows_become_tokens():
    layer, _, runner = make_runner()
    h, routing = inputs(layer, 13, absent=[(2, 1), (4, 0), (4, 1)])
    out = runner(h, routing)
    assert close(out, finalized_exactly(layer, h, routing))
    assert out[4].count_nonzero() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prepared_inputs_change_nothing(kind, dtype):
    layer, experts, runner = make_runner(kind, dtype)
    h, routing = inputs(layer, 9, dtype=dtype)
    expected = runner(h, routing)
    assert torch.equal(runner.run_prepared(runner.prepare(h, routing)), expected)
    assert torch.equal(runner.run_prepared(PreparedInputs(experts.prepare(h), routing)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tokens(kind, dtype):
    layer, _, runner = make_runner(kind, dtype)
    h, routing = inputs(layer, 0, dtype=dtype)
    out = runner(h, routing)
    assert out.shape == (0, layer.config.moe_hidden_size)
    assert out.dtype == dtype


def test_no_tokens_on_any_path():
    layer, experts, _ = make_runner()
    output = experts(*inputs(layer, 0))
    for options in ({}, {"variance_size": 8}, {"row_reduce": lambda rows: rows}):
        finalized = Finalizer(experts.post_expert_norm, **options)(output)
        assert finalized.hidden_states.shape == (0, layer.config.moe_hidden_size)


def test_no_route_here():
    layer, _, runner = make_runner()
    h, routing = inputs(layer, 3, absent=[(t, k) for t in range(3) for k in range(2)])
    assert torch.equal(runner(h, routing), torch.zeros_like(h))


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


def run_in_step(callables):
    """Run every rank's function in a thread; `all_reduce` inside them sums over all of them."""
    slots = [torch.empty(0)] * len(callables)
    barrier = threading.Barrier(len(callables))
    results = [None] * len(callables)

    def run(rank):
        def all_reduce(tensor):
            slots[rank] = tensor
            barrier.wait(20)
            total = torch.stack(slots).sum(dim=0)
            barrier.wait(20)
            return total

        results[rank] = callables[rank](all_reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(callables))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("route_major", [True, False])
@pytest.mark.parametrize("variance_size", [None, 16])
def test_tensor_parallel_rows_are_summed_before_the_norm(route_major, variance_size):
    layer = make_layer(moe_intermediate_size=64)
    h, routing = inputs(layer, 11, absent=[(3, 0)])
    exact = finalized_exactly(layer, h, routing, variance_size=variance_size)

    def rank(index):
        def run(all_reduce):
            experts = load(layer, mesh=Mesh(tensor=MeshAxis(index, 4)))
            finalizer = Finalizer(
                experts.post_expert_norm, row_reduce=all_reduce, variance_size=variance_size
            )
            if route_major:
                # `combine` would double it: the runner must see that nothing is left to add.
                return MoERunner(experts, finalizer, combine=lambda x: x * 4)(h, routing)
            finalized = finalizer(experts(h, routing))
            assert finalized.is_reduced
            return finalized.hidden_states

        return run

    for found in run_in_step([rank(index) for index in range(4)]):
        assert close(found, exact)


def test_summing_after_the_norm_would_be_wrong():
    layer = make_layer(moe_intermediate_size=64)
    h, routing = inputs(layer, 11)
    total = torch.zeros_like(h)
    for index in range(4):
        experts = load(layer, mesh=Mesh(tensor=MeshAxis(index, 4)))
        total = total + MoERunner(experts, Finalizer(experts.post_expert_norm))(h, routing)
    assert not close(total, finalized_exactly(layer, h, routing), 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_expert_parallel_outputs_are_summed_after_the_finalizer(kind):
    layer, _, whole = make_runner(kind)
    h, routing = inputs(layer, 11, absent=[(3, 0)])

    def rank(index):
        def run(all_reduce):
            experts = load(layer, kind, mesh=Mesh(expert=MeshAxis(index, 4)))
            runner = MoERunner(experts, Finalizer(experts.post_expert_norm), combine=all_reduce)
            assert not runner.finalize(runner.prepare(h, routing)).is_reduced
            return runner(h, routing)

        return run

    for found in run_in_step([rank(index) for index in range(4)]):
        assert close(found, whole(h, routing).double())


def test_a_path_that_reduces_is_not_reduced_again():
    layer, experts, _ = make_runner()
    h, routing = inputs(layer, 4)

    class Reduced(KernelPath):
        def __call__(self, output):
            return dataclasses.replace(super().__call__(output), is_reduced=True)

    norm: WeightFirstRMSNorm = experts.post_expert_norm
    plain = MoERunner(experts, Finalizer(norm), combine=lambda x: x * 2)
    fused = MoERunner(
        experts, Finalizer(norm, fused_paths=[Reduced(norm)]), combine=lambda x: x * 2
    )
    assert torch.equal(plain(h, routing), 2 * fused(h, routing))
