"""The time model against measured figures, and against common sense."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from tests.planner.released import released

from musespark.config.parallel import Parallelism
from musespark.planner.devices import DEVICES
from musespark.planner.layout import Layout, make_layout
from musespark.planner.memory import Workload
from musespark.planner.plan import make_plan, rank_plans
from musespark.planner.roofline import (
    EXPERTS_MEASURED,
    _Step,
    decode_time,
    experts_slowdown,
    fullest_rank,
    prefill_time,
    step_time,
)

H200 = DEVICES["h200"]
ONE = Layout(Parallelism())
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_experts.json"


def layout(**sizes):
    return make_layout(
        **{"gpus": 8, "nodes": 1, "tp": None, "ep": None, "pp": None, "dp": None} | sizes
    )


def test_the_table_holds_the_measured_figures():
    rows = json.loads(RESULTS.read_text())["nvfp4"]
    for tokens, microseconds in EXPERTS_MEASURED.items():
        assert [microseconds] == [
            row["us"]
            for row in rows
            if row["tokens"] == tokens and row["routing"] == "uniform"
        ]  # fmt: skip


@pytest.mark.parametrize("tokens", list(EXPERTS_MEASURED))
def test_experts_take_as_long_as_measured(tokens):
    """Two models that differ in one layer of NVFP4 experts differ by its time."""
    config = released()
    step = _Step(config, ONE, H200, Workload(2048, 1), tokens)
    (stage,) = ONE.stages(config)
    step.add_experts(dataclasses.replace(stage, first_layer=1, layers=stage.layers[1:2]))
    assert sum(step.seconds.values()) == pytest.approx(EXPERTS_MEASURED[tokens] * 1e-6, rel=0.03)


# Microseconds of one layer with NVFP4 experts and a sliding window on H200s: T sequences of 4096
# tokens that decode, or one prompt of T tokens (docs/benchmarks.md). Over two, the measured layer's
# random router chose fewer experts between 4 and 256 tokens than an even one.
LAYER_MEASURED = {
    1: {1: 235.2, 4: 392.2, 16: 832.1, 64: 1709.2, 256: 2451.0, 1024: 3332.3, 4096: 8974.7},
    2: {1: 200.2, 4: 278.7, 256: 1398.0, 1024: 2439.2, 4096: 7706.2},
}


@pytest.mark.parametrize(
    ("gpus", "tokens"), [(gpus, T) for gpus, times in LAYER_MEASURED.items() for T in times]
)
def test_a_layer_takes_about_as_long_as_measured(gpus, tokens):
    config, spread = released(), layout(gpus=gpus, tp=gpus)
    step = _Step(config, spread, H200, Workload(4096, tokens), tokens)
    (stage,) = spread.stages(config)
    layer = dataclasses.replace(
        stage, first_layer=2, layers=config.layers[2:3], is_first=False, is_last=False
    )
    assert layer.layers[0].sliding_window == 2048
    decodes = tokens <= 256
    step.add_weights(layer)
    step.add_attention(layer, tokens if decodes else 1, 4096 if decodes else tokens)
    step.add_experts(layer)
    step.add_small(layer)
    # The last stage's hand-over is of no tokens here.
    step.add_collectives(dataclasses.replace(layer, is_last=True), 0)
    measured = LAYER_MEASURED[gpus][tokens] * 1e-6
    assert sum(step.seconds.values()) == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_rows_that_travel_wait_for_the_host(tokens):
    """Steps of few tokens take as long as 62 layers' launches; many tokens hide them."""
    config, spread = released(), layout(dp=8, ep=8)
    workload = Workload(4096, 8 * tokens)
    few = step_time(config, spread, H200, workload, tokens=tokens, sequences=tokens, context=64)
    assert few.limit == "waiting for the host"
    sparse = sum(layer.mlp == "sparse" for layer in config.layers)
    assert few.total == pytest.approx(sparse * 3.4e-3)
    many = step_time(config, spread, H200, workload, tokens=8192, sequences=1, context=8192)
    assert many.seconds["waiting for the host"] == 0
    assert "waiting for the host" not in decode_time(config, layout(tp=8), H200, workload).seconds


def test_larger_steps_take_longer():
    times = [
        step_time(released(), layout(tp=8, ep=8), H200, Workload(4096, 1),
                  tokens=tokens, sequences=1, context=4096).total
        for tokens in (1, 4, 16, 64, 256, 512, 1024, 4096)
    ]  # fmt: skip
    assert times == sorted(times)


def test_longer_contexts_read_more_of_the_cache():
    steps = [decode_time(released(), layout(tp=8), H200, Workload(n, 8)) for n in (2**14, 2**17)]
    assert steps[0].seconds["reading weights"] == steps[1].seconds["reading weights"]
    assert steps[0].seconds["reading the KV cache"] < steps[1].seconds["reading the KV cache"] / 5
    assert decode_time(released(), layout(tp=8), H200, Workload(2**20, 64)).limit == (
        "reading the KV cache"
    )


def test_collective_bytes_of_one_step():
    """tp 8, one token: per layer o_proj's sum, K partial rows summed, two gathers."""
    D, H, K, V, L = 8192, 4096, 8, 202048, 62
    per_layer = 2 * D * 2 + 2 * K * H * 2 + (D + H) * 2
    expected = (L * per_layer + 2 * D * 2 + V * 4) * 7 / 8
    step = decode_time(released(), layout(tp=8), H200, Workload(2048, 1))
    assert step.collective_bytes == pytest.approx(expected, rel=1e-6)
    # Whole experts: one finished row per token instead of K partial ones.
    step = decode_time(released(), layout(tp=8, ep=8), H200, Workload(2048, 1))
    saved = L * 2 * (K - 1) * H * 2 * 7 / 8
    assert step.collective_bytes == pytest.approx(expected - saved, rel=1e-6)


def test_one_gpu_sends_nothing_and_groups_across_nodes_are_slower():
    assert decode_time(released(), ONE, H200, Workload(2048, 8)).collective_bytes == 0
    inside = decode_time(released(), layout(gpus=16, tp=16), H200, Workload(2048, 8))
    across = decode_time(released(), layout(gpus=8, nodes=2, tp=16), H200, Workload(2048, 8))
    assert across.collective_bytes == inside.collective_bytes
    assert across.seconds["collectives"] > 2 * inside.seconds["collectives"]


def test_long_prompts_are_limited_by_products():
    step = prefill_time(released(), layout(tp=8), H200, Workload(131072, 1), 131072)
    assert step.limit == "products"
    short = prefill_time(released(), layout(tp=8), H200, Workload(131072, 1), 4096)
    assert step.total > 32 * short.total


def test_slowdown_stays_within_what_was_measured():
    values = [experts_slowdown(10**exponent) for exponent in (-4, -2, -1, 0, 1, 2, 4)]
    assert min(values) >= 1
    assert max(values) < 1.5
    assert all(map(math.isfinite, values))


def test_the_fullest_rank_holds_more_than_the_mean_and_no_more_than_there_is():
    assert fullest_rank(8, 1, 32) == 8
    assert 2 < fullest_rank(8, 8, 32) < 4
    assert fullest_rank(256, 8, 32) == 32


def test_what_fits_comes_first_and_the_fastest_of_it():
    layouts = [layout(tp=1, dp=8), layout(tp=8), layout(tp=8, ep=8), layout(tp=4, pp=2)]
    plans = rank_plans(make_plan(released(), each, H200, Workload(8192, 8)) for each in layouts)
    fits = [plan.memory.fits for plan in plans]
    assert fits == [True, True, True, False]
    times = [plan.decode.total for plan in plans[:3]]
    assert times == sorted(times)
