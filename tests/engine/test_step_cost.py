"""What the engine costs beside the model: see benchmarks/scheduler_cost.py for the whole story."""

import time

from benchmarks.scheduler_cost import SETTINGS, make_engine


def test_256_running_requests_step_in_under_three_milliseconds():
    engine = make_engine(256)
    for length in range(256):
        engine.add_request([length % 7] * (200 + length), SETTINGS["greedy"])
    while engine.stats().generation_tokens < 256:
        engine.step()
    seconds = []
    for _ in range(60):
        # The processor time of this thread: other processes may hold the core meanwhile.
        started = time.thread_time()
        assert len(engine.step()) == 256
        seconds.append(time.thread_time() - started)
    assert sorted(seconds)[len(seconds) // 2] < 0.003
