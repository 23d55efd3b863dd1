"""Conversations as text in the Muse Spark wire format.

The same format as `chat_template.jinja` beside the checkpoint (a test compares the two), cut into
segments so that training knows which tokens are the assistant's own.
"""

import json
from dataclasses import dataclass

from musespark.evals.conversation import Conversation, Json, Message, Tool, ToolCall

BEGIN = "<|begin_of_text|>"
START = "<|start|>"
MESSAGE = "<|message|>"
END_OF_MESSAGE = "<|eom|>"
END_OF_TURN = "<|eot|>"
GENERATION_PROMPT = f"{START}assistant"


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation; `trained` marks what the assistant has to write."""

    text: str
    trained: bool


def tool_signature(tool: Tool) -> str:
    """Return one line that offers a tool: `name(a: integer): What it does.`"""
    parameters = ", ".join(f"{p.name}: {p.kind}" for p in tool.parameters)
    return f"{tool.name}({parameters}): {tool.description}"


def tool_call_body(call: ToolCall) -> str:
    """Return a call in ATEM: strings bare, every other type as JSON, nothing escaped."""

    def spelled(value: Json) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    parameters = "".join(
        f'<atem:parameter name="{name}">{spelled(value)}</atem:parameter>\n'
        for name, value in call.arguments.items()
    )
    return (
        f'<atem:function_calls>\n<atem:invoke name="{call.name}">\n{parameters}'
        "</atem:invoke>\n</atem:function_calls>"
    )


def system_message(conversation: Conversation) -> str:
    """Return the system message: the caller's text, the reasoning strength, the tools on offer."""
    parts = [conversation.system] if conversation.system else []
    parts.append(f"Reasoning strength: {conversation.effort}.")
    if conversation.tools:
        lines = "\n".join(tool_signature(tool) for tool in conversation.tools)
        parts.append(f"# Tools\n{lines}")
    body = "\n\n".join(parts)
    return f"{BEGIN}{START}system{MESSAGE}{body}{END_OF_TURN}"


def message_text(message: Message) -> str:
    """Return one message after the system message, header and end included."""
    if message.role == "assistant":
        return GENERATION_PROMPT + assistant_text(message)
    if message.role == "tool":
        output = f'<tool_output name="{message.name}">\n{message.content}\n</tool_output>'
        return f"{START}tool {message.name}{MESSAGE}{output}{END_OF_TURN}"
    return f"{START}{message.role}{MESSAGE}{message.content}{END_OF_TURN}"


def assistant_text(message: Message) -> str:
    """Return what follows `<|start|>assistant`: reasoning, then an answer or tool calls."""
    parts = []
    if message.reasoning:
        parts.append(f" to=self{MESSAGE}{message.reasoning}")
    if message.content:
        parts.append(f" to=user{MESSAGE}{message.content}")
    parts += [f" to={call.name}{MESSAGE}{tool_call_body(call)}" for call in message.tool_calls]
    if not parts:
        parts = [f" to=user{MESSAGE}"]
    return f"{END_OF_MESSAGE}{GENERATION_PROMPT}".join(parts) + END_OF_TURN


def prompt_text(conversation: Conversation) -> str:
    """Return the conversation up to and including the generation prompt."""
    history = "".join(message_text(message) for message in conversation.history)
    return system_message(conversation) + history + GENERATION_PROMPT


def segments(conversation: Conversation) -> list[Segment]:
    """Return the whole conversation in pieces; only the final reply's own words are trained."""
    pieces = [Segment(prompt_text(conversation), trained=False)]
    for index, message in enumerate(conversation.reply):
        if message.role == "assistant":
            if index > 0:
                pieces.append(Segment(GENERATION_PROMPT, trained=False))
            pieces.append(Segment(assistant_text(message), trained=True))
        else:
            pieces.append(Segment(message_text(message), trained=False))
    return pieces
