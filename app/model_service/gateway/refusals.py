"""A call that is answered by the gateway itself: why, with which status, and what the record says."""

from __future__ import annotations

from app.models.model_calls import CallEnd

FINAL = (b"x-should-retry", b"false")
"""What the SDKs of both families obey: whatever waiting helps, the gateway has done already."""
CLOSED = "the session of this attempt was closed; its calls are over"


class Refusal(Exception):
    """No answer of a model. `body`: an engine's own words in the caller's dialect, to be passed on as they are."""

    def __init__(
        self, status: int, code: str, message: str, end: CallEnd, *, body: bytes | None = None, final: bool = True
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.end = end
        self.body = body
        self.final = final


def malformed(code: str, message: str, *, status: int = 400) -> Refusal:
    """The request's own fault."""
    return Refusal(status, code, message, CallEnd.REFUSED)
