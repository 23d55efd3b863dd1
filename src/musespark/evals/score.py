"""Whether a reply is right."""

import json

from musespark.chat import Turn
from musespark.evals.conversation import Conversation, ToolCall
from musespark.evals.refusals import APOLOGY


def is_right_answer(conversation: Conversation, turn: Turn) -> bool:
    """Whether a finished turn says exactly the answer, or declines where it should."""
    if not turn.is_complete or turn.tool_calls or turn.broken_calls or turn.stray_texts:
        return False
    if conversation.task == "refusal":
        return turn.content.startswith(APOLOGY)
    return turn.content == conversation.answer


def is_right_call(wanted: ToolCall, turn: Turn) -> bool:
    """Whether a finished turn makes exactly the one call wanted, with typed arguments."""
    if not turn.is_complete or turn.broken_calls or len(turn.tool_calls) != 1:
        return False
    call = turn.tool_calls[0]
    return call.name == wanted.name and json.loads(call.arguments) == dict(wanted.arguments)
