"""GET /metrics."""

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.server.live import answer, fresh, wire

from musespark.engine.client import EngineState, EngineStats, SpeculationStats
from musespark.server.metrics import Metrics

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def test_everything_is_counted() -> None:
    text = answer("hello", "hm")
    with fresh(text, engine={"delay": 0.001}) as (_server, client):
        client.post(CHAT, json={**BODY, "n": 2})
        client.post(CHAT, json=b"[".decode())
        client.get("/nowhere/1")
        client.get("/nowhere/2")
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    count = len(wire(text))
    assert found["musespark_engine_ready",] == 1
    assert found["musespark_generation_tokens_total",] == 2 * count
    assert found["musespark_time_to_first_token_seconds_count",] == 2
    assert found["musespark_request_output_tokens_sum",] == 2 * count
    assert found["musespark_request_prompt_tokens_count",] == 1
    assert found["musespark_request_seconds_count",] == 2
    assert found["musespark_time_per_output_token_seconds_count",] > 0
    assert found["musespark_http_responses_total", CHAT, "200"] == 1
    assert found["musespark_http_responses_total", CHAT, "400"] == 1
    # Paths that do not exist must not become labels, or anybody could fill the memory.
    assert found["musespark_http_responses_total", "404", "other"] == 2
    for name in (
        "requests_running",
        "requests_waiting",
        "kv_cache_usage_ratio",
        "prompt_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "preemptions_total",
        "clients_gone_total",
        "engine_restarts_total",
    ):
        assert (f"musespark_{name}",) in found
    assert ("musespark_outputs_finished_total", "abort") in found


class Guessing:
    """As much of an engine as metrics read."""

    state = EngineState.READY
    info = SimpleNamespace(memory_bytes=(300, 200))

    def stats(self) -> EngineStats:
        return EngineStats(
            speculation=SpeculationStats(
                cycles=10,
                cycle_tokens=31,
                verified=[10, 9],
                accepted=[8, 6],
                draft_seconds=0.5,
                saved_seconds=-0.25,
            )
        )


def test_ranks_and_what_they_hold_are_told() -> None:
    engine: Any = Guessing()
    text = Metrics(lambda: engine).render().decode()
    assert "musespark_ranks 2.0" in text
    assert 'musespark_rank_memory_bytes{rank="0"} 300.0' in text
    assert 'musespark_rank_memory_bytes{rank="1"} 200.0' in text


def test_what_a_draft_brings_is_told() -> None:
    engine: Any = Guessing()
    found = {
        (sample.name.removeprefix("musespark_speculation_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(Metrics(lambda: engine).render().decode())
        for sample in family.samples
        if "speculation" in sample.name
    }
    assert found == {
        ("cycles_total",): 10,
        ("cycle_tokens_total",): 31,
        ("verified_tokens_total", "1"): 10,
        ("verified_tokens_total", "2"): 9,
        ("accepted_tokens_total", "1"): 8,
        ("accepted_tokens_total", "2"): 6,
        ("draft_seconds_total",): 0.5,
        ("saved_seconds",): -0.25,
    }
    assert b"speculation" not in Metrics(lambda: None).render()


def test_two_servers_share_nothing() -> None:
    first, second = Metrics(lambda: None), Metrics(lambda: None)
    first.clients_gone.inc()
    assert b"musespark_clients_gone_total 1.0" in first.render()
    assert b"musespark_clients_gone_total 0.0" in second.render()
    assert b"musespark_engine_ready 0.0" in first.render()
