"""Turns with what they must be read as, one for each rule of the wire format."""

from dataclasses import dataclass, field

from tests.chat.wire import call_body

from musespark.chat.events import CallBroken, StrayText, Turn
from musespark.chat.tools import Tool, ToolCall

WEATHER = Tool(
    "weather.get",
    "The weather in a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
            "where": {"$ref": "#/$defs/point"},
        },
        "$defs": {"point": {"type": "object"}},
    },
)
WRITE = Tool(
    "files.write",
    "Write a file.",
    {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
)
TOOLS = (WEATHER, WRITE)


@dataclass(frozen=True)
class Example:
    name: str
    text: str
    turn: Turn
    opening: str = field(default="assistant")


def _calls(*calls: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_{i}", name, args) for i, (name, args) in enumerate(calls))


_PARIS = call_body("weather.get", ("city", "Paris"))
_PARIS_CALL = _calls(("weather.get", '{"city": "Paris"}'))

EXAMPLES = [
    Example(
        "reasoning then answer",
        " to=self<|message|>Two and two.<|eom|><|start|>assistant to=user<|message|>Four 🙂<|eot|>",
        Turn("Two and two.", "Four 🙂", is_complete=True),
    ),
    Example(
        "answer without recipient", "<|message|>Hi<|eot|>", Turn(content="Hi", is_complete=True)
    ),
    Example(
        "commentary is content",
        " to=commentary<|message|>Looking.<|eom|><|start|>assistant to=weather.get<|message|>"
        f"{_PARIS}<|eot|>",
        Turn(content="Looking.", tool_calls=_PARIS_CALL, is_complete=True),
    ),
    Example(
        "bodies of one kind stay apart",
        " to=self<|message|>One.<|eom|><|start|>assistant to=self<|message|>Two.<|eom|>"
        "<|start|>assistant to=commentary<|message|>A<|eom|>"
        "<|start|>assistant to=user<|message|>B<|eot|>",
        Turn("One.\n\nTwo.", "A\n\nB", is_complete=True),
    ),
    Example(
        "turn begins with a call",
        f" to=weather.get<|message|>{_PARIS}<|eot|>",
        Turn(tool_calls=_PARIS_CALL, is_complete=True),
    ),
    Example(
        "any recipient is a tool",
        f" to=tools/x:y-1<|message|>{call_body('tools/x:y-1')}<|eot|>",
        Turn(tool_calls=_calls(("tools/x:y-1", "{}")), is_complete=True),
    ),
    Example(
        "parallel calls in messages of their own",
        f" to=weather.get<|message|>{_PARIS}<|eom|><|start|>assistant to=weather.get<|message|>"
        f"{call_body('weather.get', ('city', 'Rome'))}<|eot|>",
        Turn(
            tool_calls=_calls(
                ("weather.get", '{"city": "Paris"}'), ("weather.get", '{"city": "Rome"}')
            ),
            is_complete=True,
        ),
    ),
    Example(
        "parallel calls in one block",
        " to=weather.get<|message|><atem:function_calls>"
        '<atem:invoke name="weather.get"><atem:parameter name="days">2</atem:parameter>'
        '</atem:invoke><atem:invoke name="files.write"></atem:invoke></atem:function_calls><|eot|>',
        Turn(
            tool_calls=_calls(("weather.get", '{"days": 2}'), ("files.write", "{}")),
            is_complete=True,
        ),
    ),
    Example(
        "forgotten eom after reasoning",
        " to=self<|message|>Hm.<|start|>assistant to=user<|message|>Yes.<|eot|>",
        Turn("Hm.", "Yes.", is_complete=True),
    ),
    Example(
        "forgotten eom after a call",
        f" to=weather.get<|message|>{_PARIS}<|start|>assistant to=user<|message|>Done.<|eot|>",
        Turn(content="Done.", tool_calls=_PARIS_CALL, is_complete=True),
    ),
    Example(
        "forgotten start",
        " to=self<|message|>Hm.<|eom|>assistant to=user<|message|>Yes.<|eot|>",
        Turn("Hm.", "Yes.", is_complete=True),
    ),
    Example(
        "forgotten start and role",
        " to=self<|message|>Hm.<|eom|> to=user<|message|>Yes.<|eot|>",
        Turn("Hm.", "Yes.", is_complete=True),
    ),
    Example(
        "forgotten header",
        "\nJust this: to=user.<|eot|>",
        Turn(content="\nJust this: to=user.", is_complete=True),
    ),
    Example(
        "call quoted in reasoning",
        f" to=self<|message|>I could write {_PARIS}.<|eom|>"
        "<|start|>assistant to=user<|message|>No.<|eot|>",
        Turn(f"I could write {_PARIS}.", "No.", is_complete=True),
    ),
    Example(
        "call quoted in the answer",
        f" to=user<|message|>Write {_PARIS}<|eot|>",
        Turn(content=f"Write {_PARIS}", is_complete=True),
    ),
    Example(
        "special tokens quoted as text",
        " to=user<|message|>A turn ends with «eot», a message begins with «start»assistant to=self"
        "«message».<|eot|>",
        Turn(
            content="A turn ends with <|eot|>, a message begins with <|start|>assistant to=self"
            "<|message|>.",
            is_complete=True,
        ),
    ),
    Example(
        "special tokens quoted in an argument",
        f" to=files.write<|message|>{call_body('files.write', ('text', 'end: «eot»'))}<|eot|>",
        Turn(
            tool_calls=_calls(("files.write", '{"text": "end: <|eot|>"}')),
            is_complete=True,
        ),
    ),
    Example(
        "partial markers are text",
        " to=user<|message|>a <|eo<|eot|>",
        Turn(content="a <|eo", is_complete=True),
    ),
    Example(
        "tokens without meaning are not shown",
        " to=user<|message|>a<|pad|>b<|message|>c<|eot|>",
        Turn(content="abc", is_complete=True),
    ),
    Example(
        "a string that looks like JSON stays a string",
        " to=weather.get<|message|>"
        + call_body("weather.get", ("city", '{"a": 1}'), ("units", "12"), ("days", " 3\n"))
        + "<|eot|>",
        Turn(
            tool_calls=_calls(
                ("weather.get", '{"city": "{\\"a\\": 1}", "units": "12", "days": 3}')
            ),
            is_complete=True,
        ),
    ),
    Example(
        "null, references, and parameters nobody declared",
        " to=weather.get<|message|>"
        + call_body(
            "weather.get",
            ("units", "null"),
            ("where", '{"lat": 1.5, "on": true}'),
            ("more", "[1, 2]"),
            ("note", "plain words"),
            ("quote", '"x"'),
        )
        + "<|eot|>",
        Turn(
            tool_calls=_calls(
                (
                    "weather.get",
                    '{"units": null, "where": {"lat": 1.5, "on": true}, "more": [1, 2], '
                    '"note": "plain words", "quote": "\\"x\\""}',
                )
            ),
            is_complete=True,
        ),
    ),
    Example(
        "values are not trimmed",
        f" to=files.write<|message|>{call_body('files.write', ('text', '  a' + chr(10)))}<|eot|>",
        Turn(tool_calls=_calls(("files.write", '{"text": "  a\\n"}')), is_complete=True),
    ),
    Example(
        "literal closers inside a value",
        " to=files.write<|message|>"
        + call_body(
            "files.write",
            ("path", "a.txt"),
            ("text", "</atem:parameter> x </atem:invoke></atem:function_calls> y"),
        )
        + "<|eot|>",
        Turn(
            tool_calls=_calls(
                (
                    "files.write",
                    '{"path": "a.txt", "text": "</atem:parameter> x </atem:invoke>'
                    '</atem:function_calls> y"}',
                )
            ),
            is_complete=True,
        ),
    ),
    Example(
        "malformed JSON is reported",
        f" to=weather.get<|message|>{call_body('weather.get', ('days', 'three'))}<|eot|>",
        Turn(
            broken_calls=(
                CallBroken(
                    "weather.get",
                    call_body("weather.get", ("days", "three"))[
                        len("<atem:function_calls>\n") : -len("\n</atem:function_calls>")
                    ],
                    "parameter 'days' is not JSON: Expecting value: line 1 column 1 (char 0)",
                    is_truncated=False,
                ),
            ),
            is_complete=True,
        ),
    ),
    Example(
        "a dropped parameter tag is reported",
        ' to=weather.get<|message|><atem:function_calls><atem:invoke name="weather.get">Paris'
        "</atem:parameter></atem:invoke></atem:function_calls><|eot|>",
        Turn(
            broken_calls=(
                CallBroken(
                    "weather.get",
                    '<atem:function_calls><atem:invoke name="weather.get">Paris</atem:parameter>'
                    "</atem:invoke></atem:function_calls>",
                    "its tags do not pair up",
                    is_truncated=False,
                ),
            ),
            is_complete=True,
        ),
    ),
    Example(
        "words instead of a call are reported",
        " to=weather.get<|message|>Paris please<|eot|>",
        Turn(
            broken_calls=(
                CallBroken(
                    "weather.get",
                    "Paris please",
                    "it does not begin with <atem:function_calls>",
                    is_truncated=False,
                ),
            ),
            is_complete=True,
        ),
    ),
    Example(
        "a truncated call is reported as such",
        f" to=self<|message|>Call.<|eom|><|start|>assistant to=weather.get<|message|>{_PARIS[:-3]}",
        Turn(
            "Call.",
            broken_calls=(
                CallBroken(
                    "weather.get",
                    _PARIS[:-3],
                    "it does not end with </atem:function_calls>",
                    is_truncated=True,
                ),
            ),
        ),
    ),
    Example(
        "a call that is whole when the tokens end",
        f" to=weather.get<|message|>{_PARIS}",
        Turn(tool_calls=_PARIS_CALL),
    ),
    Example("truncated reasoning", " to=self<|message|>Hm", Turn("Hm")),
    Example("truncated header", " to=se", Turn()),
    Example("nothing at all", "", Turn()),
    Example(
        "a message for another role is not shown",
        " to=user<|message|>Hi.<|eom|><|start|>tool weather.get<|message|>made up<|eot|>",
        Turn(
            content="Hi.",
            stray_texts=(StrayText("tool weather.get", "made up"),),
            is_complete=True,
        ),
    ),
    Example(
        "text between messages is not shown",
        " to=user<|message|>Hi.<|eom|>\nwhat now<|eot|>",
        Turn(content="Hi.", stray_texts=(StrayText("", "\nwhat now"),), is_complete=True),
    ),
    Example(
        "a header that never ends is reported",
        " to=user Hi there<|eot|>",
        Turn(stray_texts=(StrayText("", "assistant to=user Hi there"),), is_complete=True),
    ),
    Example(
        "nothing counts after the end of the turn",
        " to=user<|message|>Hi.<|eot|>more<|start|>assistant to=self<|message|>x<|eot|>",
        Turn(content="Hi.", is_complete=True),
    ),
    Example(
        "the turn may end with end_of_text",
        " to=user<|message|>Hi.<|end_of_text|>",
        Turn(content="Hi.", is_complete=True),
    ),
    Example(
        "continuing an answer",
        " of Wight.<|eom|><|start|>assistant to=self<|message|>Hm.<|eot|>",
        Turn("Hm.", " of Wight.", is_complete=True),
        opening="assistant to=user<|message|>The Isle",
    ),
    Example(
        "continuing reasoning",
        " two.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        Turn(" two.", "Yes.", is_complete=True),
        opening="assistant to=self<|message|>One,",
    ),
    Example(
        "continuing a forced call",
        '\n<atem:parameter name="city">Paris</atem:parameter></atem:invoke></atem:function_calls>'
        "<|eot|>",
        Turn(tool_calls=_PARIS_CALL, is_complete=True),
        opening="assistant to=weather.get<|message|>"
        '<atem:function_calls><atem:invoke name="weather.get">',
    ),
    Example(
        "a model that opens its turn itself",
        "<|start|>assistant to=user<|message|>Hi.<|eot|>",
        Turn(content="Hi.", is_complete=True),
        opening="",
    ),
]
