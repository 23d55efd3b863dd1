"""Several steps under way at once, as a pipeline has them: every request still gets its tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.fake_model import VOCAB_SIZE, FakeModel, greedy
from tests.engine.harness import Finished, engine_for, finish, step

from musespark.config.sampling import SamplingParams
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.step_plan import StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)
ROOMY = CacheLayout(block_size=4, num_full_blocks=99, num_sliding_blocks=99, sliding_window=6)


def make_engine(depth, layout=ROOMY, **limits):
    model = FakeModel(layout)
    engine = engine_for(model, layout, vocab_size=VOCAB_SIZE, depth=depth, **limits)
    return engine, model


@settings(max_examples=100)
@given(
    depth=st.integers(2, 4),
    budget=st.integers(3, 12),
    spare=st.integers(0, 20),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=7),
    delays=st.lists(st.integers(0, 9), min_size=7, max_size=7),
    aborted=st.integers(0, 12),
    patience=st.integers(0, 6),
)
def test_every_request_gets_its_own_tokens(
    depth, budget, spare, prompts, delays, aborted, patience
):
    """Through preemption, shared prefixes, and an abort in the middle of a step."""
    layout = CacheLayout(4, 8 + spare, 8 + spare, 6)
    engine, _ = make_engine(depth, layout, max_num_seqs=3, max_num_batched_tokens=budget)
    results: dict[int, Finished] = {}
    ids = []
    for number, (prompt, delay) in enumerate(zip(prompts, delays, strict=False)):
        ids.append(engine.add_request(prompt, GREEDY))
        for _ in range(delay):
            step(engine, results)
        if number == aborted:
            for _ in range(patience):
                step(engine, results)
            engine.abort(ids[-1])
    finish(engine, results)
    for number, (prompt, request_id) in enumerate(zip(prompts, ids, strict=True)):
        tokens = results.get(request_id, Finished()).token_ids
        expected = greedy(prompt, 9)
        assert tokens == (expected[: len(tokens)] if number == aborted else expected)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_running_requests_are_shared_out_over_the_steps(depth):
    engine, model = make_engine(depth)
    ids = [engine.add_request([n], GREEDY) for n in range(6)]
    results: dict[int, Finished] = {}
    for number in range(depth - 1):
        assert engine.step() == []  # it fills up first
        assert len(engine._under_way) == number + 1
    finish(engine, results)
    assert set(model.num_tokens[: depth * 9]) == {6 // depth}
    assert [results[i].token_ids for i in ids] == [greedy([n], 9) for n in range(6)]


def test_an_aborted_request_does_not_disturb_those_in_its_step():
    engine, _ = make_engine(2)
    ids = [engine.add_request([n, n], GREEDY) for n in range(4)]
    results: dict[int, Finished] = {}
    step(engine, results)
    step(engine, results)
    under_way = engine._under_way[0].schedule
    engine.abort(under_way[0].request.request_id)
    engine.scheduler.check_integrity()
    finish(engine, results)
    for number, request_id in enumerate(ids):
        if request_id != under_way[0].request.request_id:
            assert results[request_id].token_ids == greedy([number] * 2, 9)


def test_draining_takes_up_everything_under_way():
    engine, _ = make_engine(3)
    for number in range(6):
        engine.add_request([number], GREEDY)
    engine.step()
    engine.step()
    engine.drain()
    assert not engine._under_way
    assert not engine.has_work
    engine.scheduler.check_integrity()


def test_an_idle_engine_in_lockstep_runs_empty_steps():
    engine, model = make_engine(2)
    engine._executor.in_lockstep = True
    for _ in range(3):
        assert engine.step() == []
    assert [len(batch.token_ids) for batch in model.batches] == [0, 0]
    assert not engine.has_work
    request_id = engine.add_request([5, 6], GREEDY)
    assert finish(engine)[request_id].token_ids == greedy([5, 6], 9)


def test_rows_of_chosen_sequences():
    plan = StepPlan(query_start=[0, 1, 5, 7], logit_rows=[0, 3, 4, 6])
    assert plan.rows_of([True, False, True]) == [0, 3]
    assert plan.rows_of([False, True, False]) == [1, 2]
