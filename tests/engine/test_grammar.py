"""Constrained output, with a model that would rather write anything else."""

import asyncio
import dataclasses
import json
import random
import re

import pytest
import torch
from tests.engine.fake_draft import FakeDraft
from tests.engine.harness import Finished

from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import AnswerScope, StructuredOutput
from musespark.engine.client import EngineInfo, EngineRequest
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import InProcessExecutor
from musespark.engine.grammar import GrammarCompiler, pack_bitmask, unpack_bitmask
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.request import FinishReason
from musespark.engine.speculation import Speculation, SpeculationSettings
from musespark.engine.thread_client import start_thread_client
from musespark.errors import RequestError

pytest.importorskip("xgrammar")

START, MESSAGE, EOM, EOT = range(256, 260)
VOCAB = 270  # the last ones are padding of the model's vocabulary
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCOPE = AnswerScope(
    start_id=START,
    message_id=MESSAGE,
    message_end_ids=(EOM,),
    turn_end_ids=(EOT,),
    headers=(tuple(b"assistant"), tuple(b"assistant to=user")),
)
RANDOM = SamplingParams(temperature=1.0, seed=1, max_tokens=250)


class NoiseModel:
    """Logits that depend on a position's last token only; some tokens may be favoured."""

    def __init__(self, script: bytes | list[int] = b"", favoured: dict[int, float] | None = None):
        self._script, self._favoured = list(script), favoured or {}

    @property
    def device(self):
        return torch.device("cpu")

    def run(self, batch):
        rows, taps = batch.logit_rows.tolist(), (batch.token_ids[:, None].float(),)
        return torch.stack([self._row(int(batch.positions[row])) for row in rows]), taps

    def _row(self, position):
        generator = torch.Generator().manual_seed(position)
        row = torch.randn(VOCAB, generator=generator)
        for token, bonus in self._favoured.items():
            row[token] += bonus
        if position < len(self._script):
            row[self._script[position]] += 100
        return row


def new_engine(model=None, eos=(EOT,), think=None):
    """With `think`, one that guesses ahead."""
    vocabulary = [bytes([i]) for i in range(256)] + [b""] * 6
    layout = CacheLayout(16, 200, 0, 8)
    limits = EngineLimits(VOCAB, 400, 16, 256, frozenset(eos))
    executor = InProcessExecutor(model or NoiseModel(), layout, 16)
    speculation = None
    if think is not None:
        settings = SpeculationSettings(num_tokens=5, costs=None, fixed_width=True)
        speculation = Speculation(FakeDraft(layout, think), settings)
    grammars = GrammarCompiler(vocabulary, VOCAB)
    return Engine(executor, layout, limits, grammars, speculation=speculation)


def generate(engine, requests):
    """Finished outputs, in order, of (prompt, params, structured output)."""
    numbers = []
    for prompt, params, wanted in requests:
        grammar = None if wanted is None else engine.compile_grammar(wanted)
        numbers.append(engine.add_request(prompt, params, grammar))
    results: dict[tuple[int, int], Finished] = {}
    while engine.has_work:
        for token in engine.step():
            result = results.setdefault((token.request_id, token.output_index), Finished())
            result.token_ids.append(token.token_id)
            result.finish_reason = token.finish_reason
        engine.scheduler.check_integrity()
    return [
        results[number, index]
        for number, (_, params, _) in zip(numbers, requests, strict=True)
        for index in range(params.n)
    ]


def text_of(result, end=EOT):
    tokens = result.token_ids
    return bytes(tokens[:-1] if tokens[-1] == end else tokens).decode()


KINDS = [
    (StructuredOutput.json_schema(SCHEMA), lambda text: json.loads(text).keys() >= {"name", "age"}),
    (StructuredOutput.regex(r"\d{3}-[a-f]+x"), re.compile(r"\d{3}-[a-f]+x").fullmatch),
    (
        StructuredOutput.choice(["yes", 'no "quoted"\n', "straße 🎉", "a|b.*"]),
        lambda text: text in ("yes", 'no "quoted"\n', "straße 🎉", "a|b.*"),
    ),
]


@pytest.mark.parametrize(("wanted", "fits"), KINDS, ids=["schema", "regex", "choice"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_follows_the_grammar(wanted, fits, temperature):
    # A byte that closes what is open keeps random JSON short.
    engine = new_engine(NoiseModel(favoured={ord('"'): 3, ord("x"): 2}))
    params = dataclasses.replace(RANDOM, temperature=temperature, n=4)
    for result in generate(engine, [([1], params, wanted)]):
        assert result.finish_reason is FinishReason.STOP
        assert fits(text_of(result))


def remembering(prompt, outputs, *, wrong_every):
    """Guesses what it has seen come before, but for some places; elsewhere tokens that no grammar
    here allows."""
    known = {}
    for output in outputs:
        tokens = [*prompt, *output.token_ids]
        for place in range(len(prompt), len(tokens)):
            is_wrong = place % wrong_every == 0
            known[tuple(tokens[:place])] = VOCAB - 1 if is_wrong else tokens[place]

    def think(tokens):
        logits = torch.zeros(VOCAB)
        logits[known.get(tuple(tokens), 0)] = 50
        return logits

    return think


GUESSED = [
    *(wanted for wanted, _ in KINDS),
    *(dataclasses.replace(wanted, scope=SCOPE) for wanted, _ in KINDS),
]


@pytest.mark.parametrize("wanted", GUESSED, ids=lambda wanted: f"{wanted.kind}{wanted.scope and 1}")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guessing_ahead_changes_no_constrained_output(wanted, temperature):
    """Guesses run through headers and answers, past ends, and into what is forbidden."""
    prompt = [1]
    script = [1, EOM, START, *b"assistant", MESSAGE] if wanted.scope else []

    def model():
        return NoiseModel(script, favoured={ord('"'): 3, ord("x"): 2, EOT: 2, ord("}"): 2})

    params = dataclasses.replace(RANDOM, temperature=temperature, n=3, min_tokens=2, logprobs=1)
    expected = generate(new_engine(model()), [(prompt, params, wanted)])
    assert max(len(result.token_ids) for result in expected) > 3
    for wrong_every in (3, 1000):
        think = remembering(prompt, expected, wrong_every=wrong_every)
        engine = new_engine(model(), think=think)
        assert generate(engine, [(prompt, params, wanted)]) == expected
        assert sum(engine.stats().speculation.accepted) > 3


def test_looking_ahead_finds_what_will_be_allowed_and_leaves_no_trace():
    compiler = GrammarCompiler([bytes([i]) for i in range(256)], VOCAB)
    for scope in (None, SCOPE):
        grammar = compiler.compile(StructuredOutput.regex(r"ab[cd]{2,5}e?", scope))
        prompt = [7] if scope is None else [START, *b"assist"]
        tokens = [*(b"" if scope is None else b"ant"), *([] if scope is None else [MESSAGE])]
        tokens += [*b"abcdde", EOT]
        stepping, looking = (grammar.constrain(prompt, frozenset([EOT])) for _ in range(2))
        size = len(tokens)
        for done in range(size):
            ahead = tokens[done : done + 4]
            found = torch.zeros((size + 5, -(-VOCAB // 32)), dtype=torch.int32)
            rows = looking.fill_allowed(found, 2, ahead)
            for place, token_id in enumerate(ahead):
                expected = torch.zeros_like(found)
                follower = grammar.constrain(prompt, frozenset([EOT]))
                for past in tokens[: done + place]:
                    follower.accept(past)
                is_active = bool(follower.fill_allowed(expected, 0))
                assert (2 + place in rows) == is_active
                assert torch.equal(found[2 + place], expected[0])
                assert not is_active or bool(expected[0, token_id // 32] >> token_id % 32 & 1)
            if rows[:1] == [2]:  # nothing is said of what is behind a refused guess
                assert looking.fill_allowed(found, 0, [ord("z"), ord("z")]) == [0]
            looking.accept(tokens[done])
            stepping.accept(tokens[done])
        assert looking.is_finished
        assert stepping.is_finished


def test_any_object_but_nothing_else_is_a_json_object():
    engine = new_engine(NoiseModel(favoured={ord("["): 3, ord("}"): 5, ord('"'): 6, 1: 4, 9: 4}))
    for result in generate(
        engine, [([1], dataclasses.replace(RANDOM, n=8), StructuredOutput.json_object())]
    ):
        assert result.finish_reason is FinishReason.STOP
        assert isinstance(json.loads(text_of(result)), dict)


def test_others_in_the_batch_are_left_alone():
    wanted = KINDS[0][0]
    free = [([n], dataclasses.replace(RANDOM, seed=n, max_tokens=40), None) for n in range(5)]
    expected = [r.token_ids for r in generate(new_engine(), free)]
    mixed = [pair for request in free for pair in (request, ([1], RANDOM, wanted))]
    assert [r.token_ids for r in generate(new_engine(), mixed)[::2]] == expected


def test_without_an_end_token_the_output_ends_when_nothing_can_follow():
    for eos, params in (((), RANDOM), ((EOT,), dataclasses.replace(RANDOM, ignore_eos=True))):
        engine = new_engine(eos=eos)
        (result,) = generate(engine, [([1], params, StructuredOutput.regex("[0-9]{5}"))])
        assert result.finish_reason is FinishReason.STOP
        assert re.fullmatch("[0-9]{5}", text_of(result))


def turn_with(*messages):
    """Tokens of a turn's messages, given as (header, body) texts, up to the last body."""
    tokens = []
    for header, body in messages:
        tokens += [START, *header.encode(), MESSAGE, *body.encode(), EOM]
    return tokens[:-1]


def test_only_the_answer_is_constrained():
    """The script is what the model insists on; after it, the model writes noise."""
    prompt = [START, *b"assistant"]
    script = turn_with(
        ("assistant to=self", "let me think: {[ no json"),
        ("assistant to=tool.x", "<atem:...>not json"),
        ("assistant to=user", ""),
    )
    # The model predicts the token after each position.
    engine = new_engine(NoiseModel(script=script[1:]))
    wanted = StructuredOutput.json_schema(SCHEMA, SCOPE)
    (result,) = generate(engine, [(prompt, RANDOM, wanted)])
    tokens = [*prompt, *result.token_ids]
    assert tokens[: len(script)] == script
    assert tokens[-1] == EOT
    answer = json.loads(bytes(tokens[len(script) : -1]).decode())
    assert 0 <= answer["age"] <= 120


def test_the_answer_may_begin_in_the_prompt():
    prompt = turn_with(("user", "hi"), ("assistant", '{"name": "Al'))
    wanted = StructuredOutput.json_schema(SCHEMA, SCOPE)
    (result,) = generate(new_engine(), [(prompt, RANDOM, wanted)])
    assert json.loads('{"name": "Al' + text_of(result))["name"].startswith("Al")
    engine = new_engine()
    prompt = turn_with(("user", "hi"), ("assistant", "Sure! "))
    with pytest.raises(RequestError, match="does not fit"):
        engine.add_request(prompt, RANDOM, engine.compile_grammar(wanted))
    assert not engine.has_work


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput.json_schema("{nonsense"),
        StructuredOutput.json_schema("[1]"),
        StructuredOutput.json_schema({"type": "objct"}),
        StructuredOutput.json_schema({"$ref": "http://example.org/schema"}),
        StructuredOutput.json_schema({"properties": {"a": [{"$ref": "file:///etc/passwd"}]}}),
        StructuredOutput.json_schema({"$ref": "#/nowhere"}),
        StructuredOutput.regex("(a"),
        StructuredOutput.regex("a" * 300_000),
    ],
)
def test_what_is_no_grammar_is_refused(wanted):
    with pytest.raises(RequestError, match=wanted.kind.value):
        new_engine().compile_grammar(wanted)


def test_refusals_say_why_and_not_where():
    with pytest.raises(RequestError, match="regex: cannot be used: Regex parsing error") as refused:
        new_engine().compile_grammar(StructuredOutput.regex("(a"))
    assert "cpp" not in str(refused.value)


def test_a_pattern_that_slows_everybody_down_is_given_up():
    engine = new_engine(NoiseModel(favoured={ord("a"): 50}))
    params = dataclasses.replace(RANDOM, max_tokens=390)
    (result,) = generate(engine, [([1], params, StructuredOutput.regex("((a+)+)+b"))])
    assert result.finish_reason is FinishReason.ABORT
    assert len(result.token_ids) < 300


def test_an_engine_without_a_vocabulary_refuses():
    layout = CacheLayout(16, 200, 0, 8)
    executor = InProcessExecutor(NoiseModel(), layout, 16)
    engine = Engine(executor, layout, EngineLimits(VOCAB, 400, 16, 256, frozenset()))
    with pytest.raises(RequestError, match=r"musespark\[structured\]"):
        engine.compile_grammar(StructuredOutput.json_object())


def test_bitmasks_unpack_lowest_bit_first():
    rng = random.Random(0)
    allowed = torch.tensor([[rng.random() < 0.5 for _ in range(70)] for _ in range(3)])
    words = torch.zeros(3, 3, dtype=torch.int64)
    for token in range(70):
        words[:, token // 32] |= allowed[:, token].long() << (token % 32)
    words = words.to(torch.int32)
    assert torch.equal(unpack_bitmask(words, 70), allowed)
    assert torch.equal(torch.stack([pack_bitmask(row) for row in allowed]), words)


def build_engine():
    engine = new_engine()
    info = EngineInfo(
        vocab_size=VOCAB,
        max_model_len=400,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        eos_token_ids=(EOT,),
        block_size=16,
        num_full_blocks=200,
        num_sliding_blocks=0,
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        structured_output=True,
    )
    return engine, info


def test_grammars_arrive_through_the_client_and_bad_ones_are_refused():
    async def scenario():
        client = start_thread_client(build_engine)
        await client.wait_ready()
        wanted = StructuredOutput.regex(r"\d{3}-[a-f]+x")
        stream = await client.generate(EngineRequest("a", (1,), RANDOM, wanted))
        tokens = [token async for output in stream for token in output.token_ids]
        assert re.fullmatch(r"\d{3}-[a-f]+x", bytes(tokens[:-1]).decode())
        with pytest.raises(RequestError, match="regex"):
            await client.generate(EngineRequest("b", (1,), RANDOM, StructuredOutput.regex("(")))
        slow = asyncio.create_task(client.generate(EngineRequest("c", (1,), RANDOM, wanted)))
        await asyncio.sleep(0)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        stream = await client.generate(EngineRequest("c", (2,), RANDOM, wanted))
        assert [output async for output in stream][-1].finish_reason is FinishReason.STOP
        await client.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 30))
