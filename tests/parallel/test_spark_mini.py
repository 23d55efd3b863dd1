"""The packaged model, cut over two processes, answers as it does in one."""

from dataclasses import replace
from typing import Any

import pytest
from tests.engine.harness import GREEDY, engine_for, finish, layout_for, runner_for

from musespark import load_decoder
from musespark.chat import ChatFormat
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.parallel import Parallelism
from musespark.evals.run import evaluate
from musespark.parallel.mesh import build_mesh

# Those with short answers: a step costs a few milliseconds of messages.
TASKS = ("comparison", "counting", "lookup", "json", "talk")
SAMPLES = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "expert_parallel": True},
}


def evaluated(rank, settings):
    """(the report, every reply's tokens); all ranks run the same requests in the same order."""
    folder = resolve_checkpoint("spark-mini")
    parallelism = Parallelism(**settings)
    mesh = build_mesh(parallelism, rank)
    decoder = load_decoder(folder, dtype="float32", parallelism=parallelism, mesh=mesh)
    decoder.pack()
    layout = layout_for(decoder, 16, 512)
    engine = engine_for(
        runner_for(decoder, layout),
        layout,
        vocab_size=decoder.config.vocab_size,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_model_len=2048,
        eos_token_ids=decoder.config.eos_token_ids,
    )
    replies: list[list[int]] = []

    def generate(prompts, max_tokens, stop_ids):
        params = replace(
            GREEDY, max_tokens=max_tokens, ignore_eos=False, stop_token_ids=tuple(stop_ids)
        )
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        results = finish(engine)
        replies.extend(results[request_id].token_ids for request_id in ids)
        return [results[request_id].token_ids for request_id in ids]

    report = evaluate(generate, ChatFormat.from_folder(folder), tasks=TASKS, samples=SAMPLES)
    return report, replies


@pytest.fixture(scope="module")
def alone():
    return evaluated(0, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_answers(workers, alone, layout):
    report, replies = alone
    assert sum(len(reply) for reply in replies) > 100
    assert workers.run(2, evaluated, LAYOUTS[layout]) == [(report, replies)] * 2
