"""The shapes a generated question takes: a problem, and the conversation it is asked in.

Nothing here draws random numbers or knows a task; the families of tasks build these, the wire
renders them, the scorer reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Effort: TypeAlias = Literal["low", "medium", "high", "xhigh"]
Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

EFFORTS: tuple[Effort, ...] = ("low", "medium", "high", "xhigh")
DEFAULT_EFFORT: Effort = "xhigh"


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool, with its JSON schema type."""

    name: str
    kind: Literal["string", "integer", "number", "object", "array", "boolean"]


@dataclass(frozen=True)
class Tool:
    """A function the user offers."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]

    def to_openai(self) -> dict[str, Json]:
        """Return the tool as an entry of a chat request's `tools`."""
        properties: dict[str, Json] = {p.name: {"type": p.kind} for p in self.parameters}
        required: list[Json] = [p.name for p in self.parameters]
        schema: dict[str, Json] = {
            "type": "object",
            "properties": properties,
            "required": required,
        }
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": schema,
            },
        }


@dataclass(frozen=True)
class ToolCall:
    """One call the assistant makes, with its arguments by name."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True)
class Message:
    """One message of a conversation; `name` is the tool's name on tool messages."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""

    def to_openai(self) -> dict[str, Json]:
        """Return the message as a chat template takes it: arguments as a mapping."""
        message: dict[str, Json] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.name:
            message["name"] = self.name
        return message


@dataclass(frozen=True)
class Reasoning:
    """A worked solution in pieces, so that its length can follow the reasoning effort.

    low: `brief`; medium: `steps`; high: `plan` and `steps`; xhigh: all three of `plan`, `steps`
    and `close`. Empty pieces are left out.
    """

    brief: str
    plan: str
    steps: str
    close: str

    def at(self, effort: Effort) -> str:
        """Return the text for one effort."""
        if effort == "low":
            return self.brief
        pieces = {
            "medium": (self.steps or self.plan,),
            "high": (self.plan, self.steps),
            "xhigh": (self.plan, self.steps, self.close),
        }[effort]
        return "\n".join(piece for piece in pieces if piece)


@dataclass(frozen=True)
class ToolUse:
    """The call a problem needs, what the tool then returns, and all tools that are on offer."""

    call: ToolCall
    result: str
    offered: tuple[Tool, ...]


@dataclass(frozen=True)
class Problem:
    """One question, how it is worked out and what is right.

    `key` names the question whatever its phrasing ("addition 78 345"): it alone decides whether
    the question belongs to training. It is empty where a question is its phrasing (small talk).
    `value` is the answer as data, for replies asked for in JSON (None: never asked so).
    """

    task: str
    key: str
    question: str
    phrasing: str
    reasoning: Reasoning
    answer: str
    value: Json = None
    context: tuple[Message, ...] = ()
    tool_use: ToolUse | None = None


@dataclass(frozen=True)
class Conversation:
    """A conversation that ends in the assistant's right reply.

    `history` runs up to the last user message; `reply` holds what the assistant should then do:
    one answer, or a tool call, the tool's result and the answer.
    """

    task: str
    phrasing: str
    held_out: bool
    effort: Effort
    system: str
    tools: tuple[Tool, ...]
    history: tuple[Message, ...]
    reply: tuple[Message, ...]
    answer: str

    def request(self) -> list[dict[str, Json]]:
        """Return the messages a client would send, ending in the user's question."""
        system = [Message("system", self.system)] if self.system else []
        return [message.to_openai() for message in (*system, *self.history)]

    def openai_tools(self) -> list[dict[str, Json]]:
        """Return the tools on offer as a chat request spells them."""
        return [tool.to_openai() for tool in self.tools]
