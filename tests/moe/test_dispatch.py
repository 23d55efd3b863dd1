"""Rows that travel to their experts and back give what experts on the spot give."""

import pytest
import torch
from tests.moe.nvfp4_layers import close, finalized_exactly, inputs, load, make_layer

from musespark.config.parallel import Parallelism
from musespark.moe.dispatch import AllToAllRunner, plan_dispatch
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.moe.finalize import Finalizer
from musespark.moe.router import Routing
from musespark.moe.runner import MoERunner
from musespark.parallel.mesh import ALONE, build_mesh

KINDS = {"w4a16": NVFP4Experts, "w4a4": NVFP4W4A4Experts}
# Tokens of each rank; some have none, and with few of them most ranks receive none.
TOKENS = [(5, 3, 8, 1), (0, 4, 0, 2), (0, 0, 0, 1), (0, 0, 0, 0), (40, 1, 0, 17)]


def on_many_ranks(size):
    return Parallelism(data_parallel_size=size, expert_parallel=True, moe_backend="all_to_all")


@pytest.mark.parametrize("kind", KINDS)
def test_equals_experts_on_the_spot(workers, kind):
    assert workers.run(4, check_runner, kind) == [True] * 4


def check_runner(rank, kind):
    mesh = build_mesh(on_many_ranks(4), rank)
    layer = make_layer(input_scales=(1.6e-3, 1e-2), num_experts_per_tok=3)
    for dtype in (torch.float32, torch.bfloat16):
        whole = load(layer, KINDS[kind], dtype=dtype)
        expected = MoERunner(whole, Finalizer(whole.post_expert_norm))
        experts = load(layer, KINDS[kind], dtype=dtype, mesh=mesh)
        runner = AllToAllRunner(experts, Finalizer(experts.post_expert_norm), mesh.expert)
        for counts in TOKENS:
            tokens = counts[rank]
            nowhere = [(tokens - 1, slot) for slot in range(3)]
            absent = [(0, 1), *nowhere] if tokens > 1 else []
            h, routing = inputs(layer, tokens, dtype=dtype, seed=rank, absent=absent)
            out = runner(h, routing)
            assert out.shape == h.shape
            assert out.dtype == dtype
            if tokens:
                tolerance = 1e-5 if dtype == torch.float32 else 1e-2
                assert close(out, expected(h, routing).double(), tolerance)
                if kind == "w4a16" and dtype == torch.float32:
                    assert close(out, finalized_exactly(layer, h, routing))
                assert bool(out[-1].any()) == (not absent)  # a token without an expert
    return True


def test_all_tokens_to_one_expert(workers):
    assert workers.run(2, check_one_expert) == [True] * 2


def check_one_expert(rank):
    mesh = build_mesh(on_many_ranks(2), rank)
    layer = make_layer(num_experts_per_tok=1)
    experts = load(layer, mesh=mesh)
    runner = AllToAllRunner(experts, Finalizer(experts.post_expert_norm), mesh.expert)
    h, routing = inputs(layer, 6, seed=rank)
    routing = Routing(routing.weights, torch.full_like(routing.ids, 7))
    plan = plan_dispatch(routing.ids, 4, mesh.expert)
    assert plan.send_counts == [0, 6]
    assert plan.receive_counts == ([0, 0] if rank == 0 else [6, 6])
    assert close(runner(h, routing), finalized_exactly(layer, h, routing))
    return True


def test_a_token_is_sent_once_to_each_rank_that_it_needs():
    ids = torch.tensor([[0, 1, 2], [3, 0, -1], [-1, -1, -1]])
    plan = plan_dispatch(ids, 4, ALONE)
    assert (plan.send_counts, plan.receive_counts) == ([2], [2])
    assert plan.token_index.tolist() == [0, 1]


def test_one_rank_alone():
    layer = make_layer()
    experts = load(layer)
    finalizer = Finalizer(experts.post_expert_norm)
    for tokens in (0, 1, 9):
        h, routing = inputs(layer, tokens)
        out = AllToAllRunner(experts, finalizer, ALONE)(h, routing)
        assert torch.allclose(out, MoERunner(experts, finalizer)(h, routing), atol=1e-6)
