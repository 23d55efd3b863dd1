"""Reading turns: however the tokens come together, the client ends up with the same."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.server.live import answer, call, chat_format, wire

from musespark.engine.client import EngineOutput
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.server.text import TextReader, TextRules
from musespark.server.turn import TurnDelta, TurnReader, TurnRules

LOGPROBS = TokenLogprobs(-1.0, 1, ())
TURNS = [
    answer("Grüße 🙂 an ALLE, END of it", "erst denken, dann END"),
    " to=commentary<|message|>wait<|eom|><|start|>assistant" + call("a.b", x="1 END") + "<|eot|>",
    " to=self<|message|>half a thou",
    answer("E EN END") + "more",
    "no header at all END<|eot|>",
]


def outputs(tokens: list[int], cuts: list[int], reason: FinishReason) -> list[EngineOutput]:
    """The tokens in stretches that end at `cuts`."""
    places = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    stretches = [tuple(tokens[a:b]) for a, b in itertools.pairwise(places)]
    return [
        EngineOutput(
            "r",
            0,
            stretch,
            (LOGPROBS,) * len(stretch),
            reason if i == len(stretches) - 1 else None,
        )
        for i, stretch in enumerate(stretches)
    ]


def read_turn(parts: list[EngineOutput], rules: TurnRules) -> tuple[TurnDelta, TurnReader]:
    chat = chat_format()
    reader = TurnReader(chat.tokenizer.stream(), chat.parser(), rules)
    whole = TurnDelta()
    for part in parts:
        whole.add(reader.push(part))
    return whole, reader


@given(
    st.sampled_from(TURNS),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.sampled_from([TurnRules(), TurnRules(stop=("END", "EN")), TurnRules(one_call=True)]),
)
def test_stretches_change_nothing(
    text: str, cuts: list[int], reason: FinishReason, rules: TurnRules
) -> None:
    tokens = wire(text)
    whole, reader = read_turn(outputs(tokens, cuts, reason), rules)
    singly, single_reader = read_turn(outputs(tokens, list(range(len(tokens))), reason), rules)
    assert [(i, c.name, c.arguments) for i, c in whole.calls] == [
        (i, c.name, c.arguments) for i, c in singly.calls
    ]
    assert (whole.reasoning, whole.content, whole.broken) == (
        singly.reasoning,
        singly.content,
        singly.broken,
    )
    assert whole.finish_reason == singly.finish_reason
    assert whole.answer_tokens == singly.answer_tokens
    assert reader.num_tokens == single_reader.num_tokens
    assert reader.num_reasoning_tokens == single_reader.num_reasoning_tokens
    if rules.stop:
        assert "EN" not in whole.content


@given(st.lists(st.integers(0, 60), max_size=8), st.sampled_from([(), ("STOP",), ("🙂", "S")]))
def test_stretches_change_no_text(cuts: list[int], stop: tuple[str, ...]) -> None:
    tokens = wire("Grüße 🙂 STO STOP and on<|eot|>")
    texts = []
    for places in (cuts, list(range(len(tokens)))):
        reader = TextReader(chat_format().tokenizer, TextRules(stop=stop))
        parts = outputs(tokens, places, FinishReason.STOP)
        texts.append("".join(reader.push(part).text for part in parts))
    assert texts[0] == texts[1]
    assert not any(text in texts[0] for text in stop)
