"""What may be asked of a request and of an engine, and what is refused by name."""

import pytest

from musespark.config.engine import EngineConfig
from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import GrammarKind, StructuredOutput
from musespark.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, 128], [0, 129]),
        ("temperature", [0, 1e-9, 2.5], [-0.1, float("inf"), float("nan")]),
        ("top_p", [1e-6, 1], [0, 1.1, float("nan")]),
        ("top_k", [0, 10**6], [-1]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, float("nan")]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 5], [0, -1, float("inf")]),
        ("logit_bias", [{}, {1: -100}, {2: 100.0}], [{1: 101}, {1: float("nan")}]),
        ("logit_bias", [dict.fromkeys(range(1024), 1.0)], [dict.fromkeys(range(1025), 1.0)]),
        ("stop_token_ids", [[], [1, 2]], [list(range(1025))]),
        ("max_tokens", [None, 1], [0, -5]),
        ("min_tokens", [0, 7], [-1]),
        ("logprobs", [None, 0, 100], [-1, 101]),
        ("prompt_logprobs", [None, 0, 100], [-1, 101]),
        ("seed", [None, 0, 2**63 - 1], [-1, 2**63]),
        ("stop", ["a", ["a", "b"], ()], ["", ["a", ""]]),
    ],
)
def test_sampling_ranges(name, good, bad):
    for value in good:
        hash(SamplingParams(**{name: value}))
    for value in bad:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


def test_sampling_params_keep_what_people_write():
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias={3: 1})  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == ((3, 1.0),)
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": -1}, "block_size"),
        ({"max_queue_len": 0}, "max_queue_len"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_seqs"),
    ],
)
def test_engine_settings_are_refused_by_name(settings, name):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**settings)


def test_structured_outputs():
    assert StructuredOutput.json_schema({"type": "object"}).body == '{"type": "object"}'
    assert StructuredOutput.choice(["a", "b"]).kind is GrammarKind.CHOICE
    for choices in ([], [""], [1]):
        with pytest.raises(RequestError, match="choice"):
            StructuredOutput.choice(choices)  # type: ignore[arg-type]
