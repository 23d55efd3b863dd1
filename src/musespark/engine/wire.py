"""Messages as bytes: a number for the kind, then the message in MessagePack, checked on arrival.

Not pickle: bytes that come out of a pipe are data here, and never code.
"""

import msgspec

from musespark.engine.messages import (
    Abort,
    Accepted,
    End,
    Failed,
    ForgetPrefixes,
    Hosting,
    Join,
    Loaded,
    Loading,
    Message,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Step,
    Stopped,
    Submit,
)

_KINDS: tuple[type[Message], ...] = (
    Submit,
    Abort,
    ForgetPrefixes,
    Shutdown,
    Ready,
    Accepted,
    Refused,
    Outputs,
    Failed,
    Stopped,
    Hosting,
    Join,
    Loading,
    Loaded,
    Step,
    End,
)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return bytes([_NUMBER_OF[type(message)]]) + _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """The message of such bytes.

    Raises:
        ValueError: bytes that are no message.
    """
    try:
        return _DECODERS[data[0]].decode(memoryview(data)[1:])
    except (IndexError, msgspec.MsgspecError) as error:
        raise ValueError(f"not a message of the engine's protocol: {error}") from None
