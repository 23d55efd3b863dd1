"""Messages are checked once, where they come in."""

import pytest

from musespark.chat.messages import Message, parse_messages
from musespark.chat.tools import ToolCall
from musespark.errors import RequestError

CALL = {"id": "c1", "type": "function", "function": {"name": "ns.f", "arguments": '{"a": 1}'}}


def test_roles_and_shapes():
    assert parse_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "9"},
            {"role": "assistant", "content": "", "reasoning": "again", "refusal": None},
        ]
    ) == (
        Message("system", "Be brief."),
        Message("user", "ab"),
        Message("assistant", "", "r", (ToolCall("c1", "ns.f", '{"a": 1}'),)),
        Message("tool", "9", tool_call_id="c1", name="ns.f"),
        Message("assistant", "", "again"),
    )


def test_messages_pass_through():
    messages = (Message("user", "x"),)
    assert parse_messages(messages) == messages


def test_arguments_may_be_an_object_or_empty():
    for arguments, text in (({"a": "é"}, '{"a": "é"}'), ("", "{}"), (None, "{}")):
        call = {"function": {"name": "f", "arguments": arguments}}
        (message,) = parse_messages([{"role": "assistant", "tool_calls": [call]}])
        assert message.tool_calls == (ToolCall("", "f", text),)


def test_templates_get_arguments_as_objects():
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [CALL]}])
    assert message.for_template()["tool_calls"][0]["function"] == {
        "name": "ns.f",
        "arguments": {"a": 1},
    }


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url"},
        {"type": "file", "file": {}},
    ],
)
def test_images_audio_and_files_are_refused(part):
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]: .*text model only"):
        parse_messages([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])


def _assistant(**fields):
    return [{"role": "assistant", **fields}]


def _calling(**function):
    return _assistant(tool_calls=[{"function": function}])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "messages: must be a list"),
        ("hi", "messages: must be a list"),
        ([], "at least one message"),
        (["hi"], r"messages\[0\]: must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role: must be one of system, user, assistant, tool"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "robot", "content": "x"}], "found 'robot'"),
        ([{"role": "user"}], r"messages\[0\]\.content: must be a string or a list"),
        ([{"role": "user", "content": 3}], "must be a string or a list"),
        ([{"role": "user", "content": {"type": "text"}}], "must be a string or a list"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]: must be"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: must be"),
        ([{"role": "user", "content": [{"type": "poem"}]}], r"content\[0\]: must be"),
        ([{"role": "user", "content": "x", "name": 3}], r"messages\[0\]\.name: must be a string"),
        (_assistant(), r"messages\[0\]\.content"),
        (_assistant(content="x", audio={"id": "a"}), "text model only"),
        (_assistant(content="x", reasoning_content=3), "reasoning_content: must be a string"),
        (_assistant(tool_calls="x"), "tool_calls: must be a list"),
        (_assistant(tool_calls=["x"]), r"tool_calls\[0\]\.function: must be an object"),
        (_calling(name="user", arguments="{}"), "addresses a part"),
        (_calling(name="f", arguments="{"), r"function\.arguments: not JSON"),
        (_calling(name="f", arguments="[1]"), "must be a JSON object"),
        (_calling(name="f", arguments='{"a": NaN}'), "NaN is not JSON"),
        (_calling(name="f", arguments={"a": {1, 2}}), "not JSON"),
        ([{"role": "tool", "content": "9"}], r"messages\[0\]\.tool_call_id: no earlier message"),
        ([{"role": "tool", "content": "9", "tool_call_id": "c2"}], "id 'c2'"),
        ([{"role": "tool", "content": "9", "name": "a b"}], r"messages\[0\]\.name: must be 1"),
    ],
)
def test_bad_messages_are_refused_with_the_place(raw, message):
    with pytest.raises(RequestError, match=message):
        parse_messages(raw)
