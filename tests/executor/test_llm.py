"""A real, tiny model over several processes gives the tokens of one process."""

from typing import Any

import pytest
import torch

from musespark import LLM, SamplingParams
from musespark.config.model import DecoderConfig
from musespark.errors import ConfigError
from musespark.evals.run import evaluate
from musespark.testing import make_checkpoint, make_draft, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# More sequences, and a longer prompt, than fit into one step: chunks, and several steps in turn.
PROMPTS = [[n + 1, 2 * n + 3, 5] * (n + 1) for n in range(6)] + [list(range(1, 60))]
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_queue_len": 1,  # a server's; a call may bring as many prompts as it likes
}

SHARED_EXPERTS: dict[str, Any] = {"expert_parallel": True, "moe_backend": "all_to_all"}
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "expert_parallel": True},
    {"tensor_parallel_size": 2, "sequence_parallel": True, **SHARED_EXPERTS},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    {"data_parallel_size": 2},
    {"data_parallel_size": 2, **SHARED_EXPERTS},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Wide enough in its experts for rows to travel."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(num_hidden_layers=4, moe_hidden_size=256, moe_intermediate_size=256)
    make_checkpoint(folder, config, seed=3)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    torch.set_num_threads(1)
    with LLM(folder, device="cpu", dtype="float32", **SETTINGS) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def draft(folder, tmp_path_factory):
    """Knows nothing, and reads what different stages compute."""
    return make_draft(
        tmp_path_factory.mktemp("draft") / "draft",
        DecoderConfig.from_folder(folder),
        target_layer_ids=[-1, 0, 3],
        block_size=4,
    )


def name_of(settings):
    return " ".join(f"{key}={value}" for key, value in settings.items())


@pytest.mark.parametrize("settings", LAYOUTS, ids=name_of)
def test_the_tokens_are_those_of_one_process(folder, alone, settings):
    with LLM(folder, device="cpu", dtype="float32", **SETTINGS, **settings) as llm:
        assert len(llm.info.memory_bytes) > 1
        completions = llm.generate(PROMPTS, GREEDY)
        assert [completion.token_ids for completion in completions] == alone
        with llm.stream(PROMPTS[0], GREEDY) as generation:  # left early
            next(generation)
        (again,) = llm.generate(PROMPTS[6], GREEDY)
        assert again.token_ids == alone[6]


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "num_speculative_tokens": 3},
        {"pipeline_parallel_size": 2},  # as many as pay, with several steps under way
        {"data_parallel_size": 2, "num_speculative_tokens": 2, **SHARED_EXPERTS},
    ],
    ids=name_of,
)
def test_a_draft_changes_no_token(folder, draft, alone, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given: dict[str, Any] = {"draft": str(draft), **SETTINGS, **settings}
    with LLM(folder, device="cpu", dtype="float32", **given) as llm:
        completions = llm.generate(PROMPTS, GREEDY)
        assert [completion.token_ids for completion in completions] == alone
        stats = llm.stats().speculation
        assert stats is not None
        assert stats.cycles > 10 or "pipeline_parallel_size" in settings


def test_replicas_that_share_experts_need_a_number_of_guesses(folder, draft):
    with pytest.raises(ConfigError, match="num_speculative_tokens: must be given"):
        LLM(folder, device="cpu", draft=str(draft), data_parallel_size=2, **SHARED_EXPERTS)


def test_spark_mini_is_as_right_as_in_one_process():
    def ask(**settings: Any) -> list[tuple[str, str, str]]:
        with LLM("spark-mini", device="cpu", dtype="float32", max_model_len=512, **settings) as llm:

            def generate(prompts, max_tokens, stop_ids):
                stops = tuple(stop_ids)
                params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stops)
                return [completion.token_ids for completion in llm.generate(prompts, params)]

            tasks = ("addition", "lookup")
            return list(evaluate(generate, llm.chat_format, tasks=tasks, samples=6).rows())

    alone = ask()
    assert ask(tensor_parallel_size=2) == alone
    assert ask(tensor_parallel_size=2, expert_parallel=True) == alone
