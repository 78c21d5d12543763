"""Operations of hosts: join with a token, leave with the secret that the join returned."""

from __future__ import annotations

from pydantic import Field

from app.errors import NotSignedIn
from app.instances import joining
from app.instances.joining import HostCredentials
from app.ledger import hosts
from app.ledger.users import record_action
from app.models.spec import PlainText
from app.models.wire import Wire
from app.web.api.administration import Changed
from app.web.api.operation import Operations
from app.web.calls import WebCall

operations = Operations()


class NewHost(Wire):
    """A machine that joins. called: its own name for itself."""

    called: PlainText = Field(min_length=1, max_length=200)


@operations.post("/hosts/join", HostCredentials, None, body=NewHost)
def join_host(call: WebCall) -> HostCredentials:
    """Joins a machine by the token in the header, once. Returns its credentials."""
    credentials = joining.join(call.services.settings, call.database, _secret(call), call.body.called)
    record_action(call.database, credentials.name, "host.joined", [credentials.name], address=call.caller.user_name)
    return credentials


@operations.post("/hosts/leave", Changed, None)
def leave_host(call: WebCall) -> Changed:
    """Removes the accounts of the host whose secret is in the header."""
    host = hosts.by_secret(call.database, _secret(call))
    if host is None:
        raise NotSignedIn("expected the secret of a host that joined, found an unknown one, or one of a host that left")
    joining.revoke(call.services.settings, call.database, host, "its host left")
    record_action(call.database, host.name, "host.left", [host.name], address=call.caller.user_name)
    return Changed(subject=host.name)


def _secret(call: WebCall) -> str:
    return call.headers.get("authorization", "").removeprefix("Bearer ").strip()[:200]
