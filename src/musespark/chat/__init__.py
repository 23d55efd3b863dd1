"""Messages <-> tokens: tokenizer, chat template, and the parser of the assistant's turn.

    conversation --parse_messages--> Message --ChatTemplate--> pieces --Tokenizer--> token ids
    token ids --IncrementalDecoder--> pieces --TurnParser--> reasoning, answer, tool calls

Runs without torch, and knows nothing about requests or HTTP.
"""

from musespark.chat.detokenizer import IncrementalDecoder
from musespark.chat.events import (
    CallBroken,
    CallComplete,
    ContentDelta,
    Event,
    ReasoningDelta,
    StrayText,
    Turn,
    TurnEnd,
    collect,
)
from musespark.chat.format import ChatFormat, Prompt
from musespark.chat.messages import Message, parse_messages
from musespark.chat.parser import State, TurnParser, parse_turn
from musespark.chat.pieces import Piece, join_text
from musespark.chat.template import DEFAULT_REASONING_EFFORT, REASONING_EFFORTS, ChatTemplate
from musespark.chat.tokenizer import Tokenizer
from musespark.chat.tools import Tool, ToolCall, ToolChoice, parse_tool_choice, parse_tools

__all__ = [
    "DEFAULT_REASONING_EFFORT",
    "REASONING_EFFORTS",
    "CallBroken",
    "CallComplete",
    "ChatFormat",
    "ChatTemplate",
    "ContentDelta",
    "Event",
    "IncrementalDecoder",
    "Message",
    "Piece",
    "Prompt",
    "ReasoningDelta",
    "State",
    "StrayText",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Turn",
    "TurnEnd",
    "TurnParser",
    "collect",
    "join_text",
    "parse_messages",
    "parse_tool_choice",
    "parse_tools",
    "parse_turn",
]
