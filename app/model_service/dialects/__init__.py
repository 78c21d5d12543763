"""Dialects: the protocols in which agents call models, each with a codec to one normal form (`base`)."""

from __future__ import annotations

from app.model_service.dialects.base import DialectCodec, Message, Reply, Request
from app.model_service.dialects.chat import ChatCodec
from app.model_service.dialects.messages import MessagesCodec
from app.model_service.dialects.responses import ResponsesCodec
from app.models.model_calls import Dialect

__all__ = ["DialectCodec", "Message", "Reply", "Request", "codec_for"]

_CODECS: dict[Dialect, DialectCodec] = {
    Dialect.CHAT: ChatCodec(),
    Dialect.RESPONSES: ResponsesCodec(),
    Dialect.MESSAGES: MessagesCodec(),
}


def codec_for(dialect: Dialect) -> DialectCodec:
    """Returns the codec of a dialect. It is shared, because it has no state."""
    return _CODECS[dialect]
