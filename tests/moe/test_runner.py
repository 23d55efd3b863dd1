"""The runner: prepared inputs, empty batches, and what is summed over ranks, and when."""

import dataclasses
import threading

import pytest
import torch
from tests.moe.nvfp4_layers import close, finalized_exactly, inputs, load, make_layer

from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.moe.finalize import Finalizer, KernelPath
from musespark.moe.runner import MoERunner, PreparedInputs
from musespark.parallel.mesh import Mesh, MeshAxis

KINDS = [NVFP4Experts, NVFP4W4A4Experts]


def make_runner(kind=NVFP4Experts, dtype=torch.float32, layer=None, **options):
    layer = layer or make_layer(input_scales=(1.6e-3, 1e-2))
    experts = load(layer, kind, dtype=dtype)
    return layer, experts, MoERunner(experts, Finalizer(experts.post_expert_norm, **options))


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
