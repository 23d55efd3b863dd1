"""Cache plans: within the budget, enough for one request, and refusals that name what would fit."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musespark.config.engine import EngineConfig
from musespark.config.sampling import SamplingParams
from musespark.engine.capacity import free_memory, plan_kv_cache
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.request import Request
from musespark.engine.scheduler import Scheduler
from musespark.errors import CapacityError
from musespark.model.kv_cache import allocate_kv_cache, bytes_per_block
from musespark.parallel.layout import Layout
from musespark.parallel.mesh import place_on_mesh
from musespark.testing import tiny_config

F32, BF16 = torch.float32, torch.bfloat16


def request_blocks(length, window, chunk, block):
    full = -(-length // block)
    return full, min(full, -(-(window + chunk) // block) + 1)


@settings(max_examples=200)
@given(
    kinds=st.sampled_from([None, "full", "sliding"]),
    window=st.integers(1, 3000),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.integers(1, 64),
    chunk=st.integers(64, 4096),
    max_model_len=st.one_of(st.none(), st.integers(1, 4096)),
    free_bytes=st.integers(0, 2**26),
    utilization=st.sampled_from([0.1, 0.9, 1.0]),
    dtype=st.sampled_from([BF16, F32]),
)
def test_plans_fit_and_refusals_tell_what_would(
    kinds, window, block_size, max_num_seqs, chunk, max_model_len, free_bytes, utilization, dtype
):
    model = tiny_config(layer_types=kinds, sliding_window=window)
    arguments = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": chunk,
        "block_size": block_size,
        "gpu_memory_utilization": utilization,
    }

    def plan(length):
        engine = EngineConfig(max_model_len=length, **arguments)
        return plan_kv_cache(model, engine, dtype, free_bytes)

    try:
        made = plan(max_model_len)
    except CapacityError as error:
        longest = int(re.findall(r"longest that fits is (\d+)", str(error))[0])
        assert longest < (max_model_len or 1)
        with pytest.raises(CapacityError):
            plan(longest + 1)
        if longest:
            assert plan(longest).max_model_len == longest
        return
    budget = int(free_bytes * utilization)
    spec, length = made.spec, made.max_model_len
    assert made.num_bytes <= budget
    sizes = [bytes_per_block(model, f"{kind}_attention", block_size, dtype) for kind in KINDS]
    assert made.num_bytes == spec.num_full_blocks * sizes[0] + spec.num_sliding_blocks * sizes[1]
    full, sliding = request_blocks(length, window, chunk, block_size)
    assert spec.num_full_blocks >= full or kinds == "sliding"
    assert spec.num_sliding_blocks >= sliding or kinds == "full"
    # No more than all requests together can hold.
    spare = max_num_seqs - 1  # a block for each request beside the first
    assert spec.num_full_blocks <= full * max_num_seqs + spare
    assert spec.num_sliding_blocks <= sliding * max_num_seqs + spare
    if max_model_len is None:
        if length < model.max_position_embeddings:
            with pytest.raises(CapacityError):
                plan(length + 1)
    else:
        assert length == max_model_len


KINDS = ("full", "sliding")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_one_kind_of_layers_has_one_pool(kind):
    spec = plan_kv_cache(tiny_config(layer_types=kind), EngineConfig(), F32, 2**30).spec
    assert bool(spec.num_full_blocks) == (kind == "full")
    assert bool(spec.num_sliding_blocks) == (kind == "sliding")


def test_with_memory_to_spare_every_request_gets_all_it_can_hold():
    engine = EngineConfig(max_num_seqs=3, max_num_batched_tokens=16, block_size=4)
    spec = plan_kv_cache(tiny_config(), engine, F32, 2**34).spec
    assert spec.num_full_blocks == 3 * 4096 // 4 + 2
    # One reads a chunk of 16 behind a window of 8; two more hold a window and have one to spare.
    assert spec.num_sliding_blocks == (8 + 16) // 4 + 1 + 2 * (8 // 4 + 2)


def test_longer_than_the_model_was_made_for():
    with pytest.raises(CapacityError, match=r"max_model_len: 4097 exceeds the 4096 positions"):
        plan_kv_cache(tiny_config(), EngineConfig(max_model_len=4097), F32, 2**40)


def test_a_sliding_layer_costs_no_more_for_a_longer_request():
    model = tiny_config(layer_types="sliding")
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=32, block_size=4)
    need = plan_kv_cache(model, engine, F32, 2**30).num_bytes
    assert plan_kv_cache(model, engine, F32, int(need / 0.9) + 1).max_model_len == 4096


@pytest.mark.parametrize("stored", ["auto", "bf16", "fp8_e4m3"])
def test_the_cache_takes_the_bytes_that_were_planned(stored):
    model = tiny_config()
    engine = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, kv_cache_dtype=stored)
    plan = plan_kv_cache(model, engine, F32, 2**22)
    caches = allocate_kv_cache(model, plan.spec, dtype=F32, device=torch.device("cpu"))
    tensors = [part for cache in caches for part in (cache.key, cache.value)]
    assert sum(part.nbytes for part in tensors) == plan.num_bytes
    # NaN in a slot that is masked would spread all the same.
    assert not any(part.to(F32).any() for part in tensors)


def test_free_memory_of_this_machine():
    assert free_memory(torch.device("cpu")) > 2**20


def test_max_num_seqs_requests_of_full_length_run_together():
    """The scheduler keeps a block to spare for each request that runs; the plan has it."""
    engine = EngineConfig(max_num_seqs=3, max_num_batched_tokens=48, block_size=4, max_model_len=16)
    model = tiny_config(sliding_window=8)
    spec = plan_kv_cache(model, engine, torch.float32, 10**9).spec
    layout = CacheLayout(4, spec.num_full_blocks, spec.num_sliding_blocks, model.sliding_window)
    scheduler = Scheduler(layout, engine.max_num_seqs, engine.max_num_batched_tokens)
    for number in range(3):
        scheduler.add(
            Request(
                request_id=number,
                prompt_token_ids=tuple(range(number, number + 12)),
                params=SamplingParams(),
                end_token_ids=frozenset(),
                max_total_tokens=16,
            )
        )
    assert len(scheduler.schedule()) == 3


def test_ranks_make_as_many_blocks_as_the_one_with_the_least_room():
    """Two stages, of which only the second has a full layer."""
    model = tiny_config(num_hidden_layers=4, layer_types=["sliding", "sliding", "full", "sliding"])
    engine = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, pipeline_parallel_size=2)
    layouts = [Layout(engine, place_on_mesh(engine, rank)) for rank in range(2)]
    rooms = (2**24, 2**22)

    def plan(rank, told):
        """`told`: what the other rank says, question by question."""
        asked: list[list[int]] = []

        def minimum(numbers):
            asked.append(list(numbers))
            others = told[len(asked) - 1] if len(told) >= len(asked) else numbers
            return [min(pair) for pair in zip(numbers, others, strict=True)]

        made = plan_kv_cache(model, engine, F32, rooms[rank], layout=layouts[rank], minimum=minimum)
        return made, asked

    # Each needs to know the other's first answer, then its second one.
    (_, (first_a, _)), (_, (first_b, _)) = plan(0, []), plan(1, [])
    (_, (_, second_a)), (_, (_, second_b)) = plan(0, [first_b]), plan(1, [first_a])
    made_a, made_b = plan(0, [first_b, second_b])[0], plan(1, [first_a, second_a])[0]
    assert made_a.spec == made_b.spec
    assert made_a.max_model_len == made_b.max_model_len == min(first_a + first_b)
    assert made_a.spec.num_full_blocks > 0
    assert made_b.num_bytes <= rooms[1] * engine.gpu_memory_utilization
