"""The front door: prompts in, completions out, with the packaged model."""

import json

import pytest
import torch

from musespark import LLM, SamplingParams
from musespark.config.structured_output import StructuredOutput
from musespark.errors import ConfigError, RequestError

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    return LLM("spark-mini", device="cpu", dtype="float32", max_model_len=512, max_num_seqs=8)


@pytest.fixture(autouse=True)
def no_block_is_left(request):
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")._engine
        assert not engine.has_work
        engine.scheduler.check_integrity()
        assert engine.scheduler.blocks.usage == 0


def test_prompts_run_together_as_they_do_alone(llm):
    prompts = ["One", "Two and", [3, 4, 5], "What is the meaning of all this?"]
    together = llm.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.token_ids == completion.token_ids
        assert alone.text == completion.text == llm.tokenizer.decode(completion.token_ids)
        assert alone.prompt_token_ids == completion.prompt_token_ids


def test_streaming_adds_up_to_the_result(llm):
    params = [SamplingParams(n=2, seed=1, max_tokens=9, logprobs=1, prompt_logprobs=0), GREEDY]
    with llm.stream(["abc", "def"], params) as generation:
        deltas = list(generation)
        results = generation.results()
    assert [(r.choice, r.finish_reason) for r in results] == [
        (0, "length"),
        (1, "length"),
        (0, results[2].finish_reason),
    ]
    for index, choice, result in ((0, 0, results[0]), (0, 1, results[1]), (1, 0, results[2])):
        mine = [delta for delta in deltas if (delta.index, delta.choice) == (index, choice)]
        assert [token for delta in mine for token in delta.token_ids] == result.token_ids
        assert "".join(delta.text for delta in mine) == result.text
        assert mine[-1].finish_reason == result.finish_reason
    assert len(results[0].logprobs) == len(results[1].logprobs) == 9
    assert len(results[0].prompt_logprobs) == len(results[0].prompt_token_ids)
    assert results[1].prompt_logprobs is None
    assert results[2].logprobs is None
    assert json.loads(json.dumps(results[0].to_dict()))["token_ids"] == results[0].token_ids


def test_a_stop_text_ends_one_output_and_is_not_shown(llm):
    (free,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    middle = free.text[4:7]
    cut = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(middle,))
    stopped, whole = llm.generate(["abc", "abc"], [cut, GREEDY])
    assert stopped.text == free.text[: free.text.index(middle)]
    assert stopped.finish_reason == "stop"
    assert whole.token_ids == free.token_ids[: len(whole.token_ids)]


def test_leaving_a_stream_early_frees_everything(llm):
    with llm.stream(["a", "b", "c"], SamplingParams(n=2, max_tokens=100)) as generation:
        next(generation)
    assert {result.finish_reason for result in generation.results()} == {"abort"}
    dropped = llm.stream("a", GREEDY)
    next(dropped)
    del dropped
    llm.generate("b", GREEDY)


def test_two_streams_share_the_engine(llm):
    expected = [result.token_ids for result in llm.generate(["abc", "xyz"], GREEDY)]
    first, second = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    next(second)
    list(first)
    list(second)
    assert [first.results()[0].token_ids, second.results()[0].token_ids] == expected


def test_a_refused_prompt_leaves_nothing_behind(llm):
    for prompts in (["fine", []], ["fine", list(range(256)) * 2], [[1], [-1]]):
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="2 sampling parameters"):
        llm.generate(["a"], [GREEDY, GREEDY])


def test_chat_splits_the_turn(llm):
    answer = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=200))
    assert answer.turn.content == "42"
    assert answer.turn.reasoning
    assert answer.turn.is_complete
    assert answer.completion.finish_reason == "stop"
    history = [*QUESTION, {"role": "assistant", "content": "42"}, QUESTION[0]]
    again = llm.chat(history, SamplingParams(temperature=0, max_tokens=200))
    assert again.completion.num_cached_tokens >= 16
    short = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=5))
    assert short.completion.finish_reason == "length"
    assert not short.turn.is_complete
    with pytest.raises(RequestError, match="n: must be 1"):
        llm.chat(QUESTION, SamplingParams(n=2))


def test_chat_can_go_on_with_an_answer(llm):
    begun = [*QUESTION, {"role": "assistant", "content": "4"}]
    answer = llm.chat(
        begun, SamplingParams(temperature=0, max_tokens=20), continue_final_message=True
    )
    # What the model adds is up to the model; that it adds to the answer is not.
    assert llm.tokenizer.decode(answer.completion.prompt_token_ids).endswith("4")
    shown = answer.completion.text
    assert answer.turn.content == shown[: len(answer.turn.content)]
    assert not answer.turn.reasoning


def test_only_the_answer_of_a_chat_follows_the_schema(llm):
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0, max_tokens=300)
    free = llm.chat(QUESTION, params)
    bound = llm.chat(QUESTION, params, structured_output=StructuredOutput.json_schema(schema))
    assert bound.turn.reasoning == free.turn.reasoning
    assert isinstance(json.loads(bound.turn.content)["answer"], int)
    choice = StructuredOutput.choice(["yes", "no"])
    assert llm.generate("Is it?", params, structured_output=choice)[0].text in ("yes", "no")


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3"])
def test_a_narrower_cache_keeps_the_answer(kind):
    narrow = LLM("spark-mini", device="cpu", max_model_len=512, kv_cache_dtype=kind)
    answer = narrow.chat(QUESTION, SamplingParams(temperature=0, max_tokens=200))
    assert answer.turn.content == "42"
    assert narrow.info.kv_cache_dtype == {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}[kind]


def test_a_cache_dtype_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_dtype: must be one of auto, bf16, fp8_e4m3"):
        LLM("spark-mini", kv_cache_dtype="int4")


def test_the_number_of_threads_is_a_setting():
    before = torch.get_num_threads()
    try:
        LLM("spark-mini", num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ConfigError, match="num_threads: must be 1 or more"):
        LLM("spark-mini", num_threads=0)
