"""Where in a chat turn the answer stands, in the token ids of one checkpoint."""

from musespark.chat.format import ChatFormat
from musespark.chat.pieces import END_OF_MESSAGE, MESSAGE, START
from musespark.config.structured_output import AnswerScope

# The spellings of a header whose body the user sees. The first part is in the prompt already when
# the model begins its turn, and a model may forget it later on.
_ROLES = ("assistant", "")
_RECIPIENTS = ("", " to=user", " to=commentary", "to=user", "to=commentary")


def answer_scope(chat: ChatFormat) -> AnswerScope:
    """The scope of a `StructuredOutput` for turns of `chat`."""
    encode, special_id = chat.tokenizer.encode, chat.tokenizer.special_id
    headers = {
        spelling
        for role in _ROLES
        for recipient in _RECIPIENTS
        for spelling in (
            (*encode(role), *encode(recipient)),
            tuple(encode(role + recipient)),
        )
        if not (role and recipient.startswith("to="))
    }
    return AnswerScope(
        start_id=special_id(START),
        message_id=special_id(MESSAGE),
        message_end_ids=(special_id(END_OF_MESSAGE),),
        turn_end_ids=tuple(sorted(chat.tokenizer.stop_ids)),
        headers=tuple(sorted(headers)),
    )
