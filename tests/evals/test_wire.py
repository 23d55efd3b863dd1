"""The generator's wire format is the chat template's, for this project and for transformers."""

from importlib import resources
from itertools import islice
from pathlib import Path

import pytest
import transformers

from musespark.chat import ChatFormat, parse_tools
from musespark.evals.conversation import (
    EFFORTS,
    Conversation,
    Message,
    Parameter,
    Tool,
    ToolCall,
)
from musespark.evals.generate import training_conversations
from musespark.evals.wire import prompt_text, segments, tool_call_body

FOLDER = Path(str(resources.files("musespark") / "assets/spark-mini"))


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.from_folder(FOLDER)


@pytest.fixture(scope="module")
def peer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def conversations(count: int = 300) -> list[Conversation]:
    return list(islice(training_conversations("wire"), count))


def test_the_template_renders_what_the_generator_renders(peer):
    for conversation in conversations():
        options = {
            "tools": conversation.openai_tools() or None,
            "reasoning_effort": conversation.effort,
            "tokenize": False,
        }
        reply = [message.to_openai() for message in conversation.reply]
        whole = peer.apply_chat_template([*conversation.request(), *reply], **options)
        assert whole == "".join(piece.text for piece in segments(conversation))
        prompt = peer.apply_chat_template(
            conversation.request(), add_generation_prompt=True, **options
        )
        assert prompt == prompt_text(conversation)
        assert prompt.endswith("<|start|>assistant")


def test_this_project_renders_the_same_tokens(chat, peer):
    for conversation in conversations(100):
        prompt = chat.prompt(
            conversation.request(),
            parse_tools(conversation.openai_tools()),
            reasoning_effort=conversation.effort,
        )
        assert prompt.text == prompt_text(conversation)
        encoded = peer(prompt_text(conversation), add_special_tokens=False)
        assert list(prompt.token_ids) == encoded.input_ids


def test_pieces_encode_to_what_the_whole_encodes_to(chat):
    for conversation in conversations(100):
        pieces = [piece.text for piece in segments(conversation)]
        encode = chat.tokenizer.encode_prompt
        apart = [i for text in pieces for i in encode(text, add_special_tokens=False)]
        assert apart == encode("".join(pieces), add_special_tokens=False)


@pytest.mark.parametrize("effort", EFFORTS)
def test_effort_is_in_the_system_message(peer, effort):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    text = peer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, reasoning_effort=effort
    )
    assert text == (
        "<|begin_of_text|><|start|>system<|message|>Be kind.\n\n"
        f"Reasoning strength: {effort}.<|eot|>"
        "<|start|>user<|message|>hi<|eot|><|start|>assistant"
    )


def test_the_default_effort_is_xhigh(peer):
    text = peer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "Reasoning strength: xhigh." in text


def test_tools_calls_and_results(peer):
    tool = Tool("weather.get", "Get it.", (Parameter("city", "string"), Parameter("n", "integer")))
    call = ToolCall("weather.get", {"city": 'A "b"\n', "n": 3})
    conversation = Conversation(
        task="tools",
        phrasing="",
        held_out=False,
        effort="low",
        system="",
        tools=(tool,),
        history=(Message("user", "?"),),
        reply=(
            Message("assistant", reasoning="Call it.", tool_calls=(call,)),
            Message("tool", "sunny", name="weather.get"),
            Message("assistant", "sunny"),
        ),
        answer="sunny",
    )
    expected = (
        "<|begin_of_text|><|start|>system<|message|>Reasoning strength: low.\n\n# Tools\n"
        "weather.get(city: string, n: integer): Get it.<|eot|><|start|>user<|message|>?<|eot|>"
        "<|start|>assistant to=self<|message|>Call it.<|eom|>"
        "<|start|>assistant to=weather.get<|message|>"
        '<atem:function_calls>\n<atem:invoke name="weather.get">\n'
        '<atem:parameter name="city">A "b"\n</atem:parameter>\n'
        '<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
        '<|eot|><|start|>tool weather.get<|message|><tool_output name="weather.get">\n'
        "sunny\n</tool_output><|eot|><|start|>assistant to=user<|message|>sunny<|eot|>"
    )
    assert "".join(piece.text for piece in segments(conversation)) == expected
    messages = [
        *conversation.request(),
        *(message.to_openai() for message in conversation.reply),
    ]
    rendered = peer.apply_chat_template(
        messages, tools=conversation.openai_tools(), reasoning_effort="low", tokenize=False
    )
    assert rendered == expected


def test_a_result_finds_its_tool_by_the_calls_id(peer):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
    ]
    text = peer.apply_chat_template(messages, tokenize=False)
    assert "<|start|>user<|message|>ab<|eot|>" in text
    assert text.endswith(
        '<|start|>tool f<|message|><tool_output name="f">\n9\n</tool_output><|eot|>'
    )


def test_bodies_keep_strings_bare_and_other_values_json():
    body = tool_call_body(ToolCall("f", {"s": "12", "i": 12, "b": True, "l": [1, "é"]}))
    assert '<atem:parameter name="s">12</atem:parameter>' in body
    assert '<atem:parameter name="i">12</atem:parameter>' in body
    assert '<atem:parameter name="b">true</atem:parameter>' in body
    assert '<atem:parameter name="l">[1, "é"]</atem:parameter>' in body
