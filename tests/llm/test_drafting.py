"""A draft changes no answer of the packaged model, and one that does not fit is refused."""

import dataclasses

import pytest

from musespark import LLM, SamplingParams
from musespark.checkpoint.source import packaged_draft, packaged_models, resolve_checkpoint
from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.config.structured_output import StructuredOutput
from musespark.errors import CheckpointError, ConfigError
from musespark.llm.drafting import choose_draft, with_chosen_draft
from musespark.testing import make_checkpoint, make_draft, tiny_config

QUESTIONS = ["What is 347 + 86?", "Sort the numbers: 7, 12, 3", "Hello! " * 30, "1, 2, 3,"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def target():
    return DecoderConfig.from_folder(resolve_checkpoint("spark-mini"))


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    """Random weights: it knows nothing."""
    folder = tmp_path_factory.mktemp("draft")
    return make_draft(
        folder / "draft", target, target_layer_ids=[1, 4], block_size=5, draft_vocab_size=200
    )


@pytest.fixture(scope="module")
def plain():
    return LLM("spark-mini", dtype="float32", max_num_seqs=8, max_num_batched_tokens=96)


@pytest.fixture(scope="module", params=["random", "packaged"])
def guessing(request, draft, tmp_path_factory):
    """With a draft that knows nothing, and with the one that comes with the model."""
    if request.param == "packaged" and packaged_draft("spark-mini") is None:
        pytest.skip("spark-mini comes without a draft")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return LLM(
            "spark-mini",
            dtype="float32",
            max_num_seqs=8,
            max_num_batched_tokens=96,  # prompts are read in chunks beside guesses
            draft=str(draft) if request.param == "random" else "auto",
            num_speculative_tokens=4,
        )


def same(llm, other, prompts, params, **wanted):
    results = [
        [dataclasses.replace(c, timings=None, num_cached_tokens=0) for c in done]
        for done in (model.generate(prompts, params, **wanted) for model in (llm, other))
    ]
    for one, two in zip(*results, strict=True):
        assert close(one.logprobs, two.logprobs)
        assert close(one.prompt_logprobs, two.prompt_logprobs)
        drop = {"logprobs": None, "prompt_logprobs": None}
        assert dataclasses.replace(one, **drop) == dataclasses.replace(two, **drop)


def close(one, two):
    """Other shapes of the same products round otherwise."""
    if one is None or two is None:
        return one is two
    pairs = zip(one, two, strict=True)
    return all(
        (a is b) if a is None or b is None else abs(a.logprob - b.logprob) < 1e-3 for a, b in pairs
    )


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, n=2),
        dataclasses.replace(GREEDY, stop=("4", "e "), logprobs=2),
        dataclasses.replace(GREEDY, stop=("3",), min_tokens=12),
        dataclasses.replace(GREEDY, repetition_penalty=1.3, prompt_logprobs=1),
    ],
    ids=["greedy", "seed", "stop texts", "late stop texts", "penalty"],
)
def test_the_packaged_model_answers_as_without(plain, guessing, params):
    same(plain, guessing, QUESTIONS, params)
    stats = guessing._engine.stats().speculation
    assert stats.cycles > 20


def test_constrained_answers_and_chats_are_the_same(plain, guessing):
    pytest.importorskip("xgrammar")
    wanted = StructuredOutput.regex(r"[0-9]{1,4}(, [0-9]{1,4}){2,9}")
    same(plain, guessing, QUESTIONS, GREEDY, structured_output=wanted)
    turns = [llm.chat(MESSAGES, GREEDY).turn for llm in (plain, guessing)]
    assert turns[0] == turns[1]


def test_the_width_that_pays_changes_no_answer_either(plain, draft, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llm = LLM("spark-mini", dtype="float32", max_num_seqs=8, draft=str(draft))
    same(plain, llm, QUESTIONS, GREEDY)
    assert list(tmp_path.rglob("speculation/*.json"))


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        ({}, {"num_speculative_tokens": 6}, "num_speculative_tokens: must be from 1 to 5"),
        ({"sample_from_anchor": False}, {"num_speculative_tokens": 5}, "must be from 1 to 4"),
        ({}, {"batch_invariant": True}, "batch_invariant"),
        ({}, {"draft_sampling": "best"}, "draft_sampling"),
        ({}, {"draft_verification": "none"}, "draft_verification"),
    ],
)
def test_settings_that_do_not_fit_are_refused(target, tmp_path, overrides, settings, message):
    folder = make_draft(tmp_path / "draft", target, block_size=5, **overrides)
    with pytest.raises(ConfigError, match=message):
        LLM("spark-mini", dtype="float32", draft=str(folder), **settings)


def test_a_draft_for_another_target_is_refused(tmp_path):
    tiny = tiny_config(vocab_size=128)
    make_checkpoint(tmp_path / "model", tiny)
    folder = make_draft(tmp_path / "draft", DecoderConfig.from_folder(tmp_path / "model"))
    with pytest.raises(ConfigError, match="made for another target"):
        LLM("spark-mini", dtype="float32", draft=str(folder))
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM("spark-mini", draft="nowhere")
    with pytest.raises(ConfigError, match="model_type"):
        LLM("spark-mini", draft="spark-mini")


def test_there_is_nothing_to_guess_with():
    with pytest.raises(ConfigError, match="Set draft"):
        EngineConfig(num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="draft: must be"):
        EngineConfig(draft="")


def test_auto_is_the_draft_that_comes_with_the_model(target, tmp_path):
    config = EngineConfig(draft="auto", num_speculative_tokens=2)
    other = with_chosen_draft(config, tmp_path)
    assert (other.draft, other.num_speculative_tokens) == ("none", None)
    assert choose_draft(other, target) is None
    for model in packaged_models():
        chosen = with_chosen_draft(config, model)
        assert chosen.draft in (f"{model.removesuffix('-nvfp4')}-draft", "none")
