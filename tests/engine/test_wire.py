"""Messages survive the trip as bytes, and bytes that are no message are refused."""

import pytest

from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import AnswerScope, StructuredOutput
from musespark.engine.client import EngineInfo, EngineOutput, EngineRequest, EngineStats
from musespark.engine.messages import (
    Abort,
    Accepted,
    Failed,
    ForgetPrefixes,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Stopped,
    Submit,
)
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.engine.wire import decode, encode

INFO = EngineInfo(
    vocab_size=100,
    max_model_len=50,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    eos_token_ids=(1, 2),
    block_size=16,
    num_full_blocks=10,
    num_sliding_blocks=0,
    dtype="bfloat16",
    kv_cache_dtype="float8_e4m3fn",
    device="cpu",
    structured_output=True,
)
PARAMS = SamplingParams(
    n=3, stop=("end",), stop_token_ids=(1,), logit_bias={3: -1.5}, seed=2**63 - 1, max_tokens=9
)
SCOPE = AnswerScope(
    start_id=1, message_id=2, message_end_ids=(3,), turn_end_ids=(4, 5), headers=((6, 7), ())
)
ENTRY = TokenLogprobs(-0.25, 3, ((1, -0.1), (2, float("-inf"))))
OUTPUT = EngineOutput("7", 2, (1, 2), (ENTRY, ENTRY), FinishReason.STOP, 32, (None, ENTRY))

MESSAGES = [
    Submit(EngineRequest("a", (1, 2, 3), PARAMS)),
    Submit(EngineRequest("é", (0,), PARAMS, StructuredOutput.json_schema({"type": "object"}))),
    Submit(EngineRequest("", (), PARAMS, StructuredOutput.choice(["a", "b"], SCOPE))),
    Abort("a"),
    Abort("a", 1),
    ForgetPrefixes(),
    Shutdown(),
    Ready(INFO),
    Accepted("a"),
    Refused("a", "RequestError", "n: must be 1."),
    Outputs([], EngineStats()),
    Outputs([OUTPUT, EngineOutput("8", 0, ())], EngineStats(finished={"stop": 1}, steps=3)),
    Failed("CapacityError", "too large"),
    Stopped(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_trip(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\x00", encode(Shutdown())[:1], encode(Abort("a"))[:-1] + b"\xc1"]
)
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError, match="not a message"):
        decode(data)


def test_a_long_prompt_takes_milliseconds():
    message = Submit(EngineRequest("a", tuple(range(200_000)), PARAMS))
    assert len(encode(message)) < 1_000_000
