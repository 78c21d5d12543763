"""Signs browsers in, by a one-time link or by a pasted token, and out."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.errors import MegaFlowError
from app.ledger import users
from app.ledger.users import SESSION_S, Scope, TokenKind, UserToken
from app.web.access import COOKIE, STRANGERS_BYTES, Access, check_form, peer_of, refuse_other_sites
from app.web.calls import WebServices
from app.web.pages.page import read_form
from app.web.pages.rendering import PageView, render


def routes(services: WebServices, access: Access) -> list[Route]:
    """Returns the routes of signing in, which need no session, and of signing out."""

    async def sign_in(request: Request) -> Response:
        """Shows the form, or signs in at once by a one-time link."""
        after, once = _own(request.query_params.get("next", "/")), request.query_params.get("once", "")
        if not once or request.method == "HEAD":  # a preview must not use up the link
            return render(PageView("sign_in.html", {"next": after}), None, {})
        token = await run_in_threadpool(users.take_link, services.database, once)
        if token is not None:
            return await begun(token, after)
        with suppress(MegaFlowError):
            await run_in_threadpool(access.caller, request, Scope.READ)
            return RedirectResponse(after, status_code=303)  # the link was used, by this browser
        access.refuse_guessing(peer_of(request))
        return render(PageView("sign_in.html", {"next": after, "used": True}, 401), None, {})

    async def signed_in(request: Request) -> Response:
        refuse_other_sites(request)
        form = await read_form(request, STRANGERS_BYTES)
        after, pasted = _own(form.get("next", "/")), form.get("token", "").strip()
        token = await run_in_threadpool(users.find_token, services.database, pasted, TokenKind.TOKEN)
        if token is None:
            access.refuse_guessing(peer_of(request))
            return render(PageView("sign_in.html", {"next": after, "wrong": True}, 401), None, {})
        return await begun(token, after)

    async def begun(token: UserToken, after: str) -> Response:
        """Begins a session of the browser."""
        secret = await run_in_threadpool(_session, services, token)
        answer = RedirectResponse(after, status_code=303)
        secure = services.settings.web_base().startswith("https:")
        answer.set_cookie(COOKIE, secret, max_age=int(SESSION_S), httponly=True, samesite="lax", secure=secure)
        return answer

    async def sign_out(request: Request) -> Response:
        caller = await run_in_threadpool(access.caller, request, Scope.READ)
        form = await read_form(request)
        check_form(caller, form.get("csrf", ""))
        await run_in_threadpool(users.end_session, services.database, caller.session)
        access.forget(caller.session)
        answer = RedirectResponse("/sign-in", status_code=303)
        answer.delete_cookie(COOKIE)
        return answer

    return [
        Route("/sign-in", sign_in, methods=["GET"], name="sign_in"),
        Route("/sign-in", signed_in, methods=["POST"], name="signed_in"),
        Route("/sign-out", sign_out, methods=["POST"], name="sign_out"),
    ]


def _session(services: WebServices, token: UserToken) -> str:
    """Makes a browser's secret. It lapses with the token, and is revoked with it."""
    left = SESSION_S
    if token.kind is TokenKind.TOKEN and token.expires_at is not None:
        left = min(left, max(1.0, (token.expires_at - datetime.now(UTC)).total_seconds()))
    secret, _ = users.add_token(
        services.database, token.user_name, token.highest, kind=TokenKind.SESSION, expires_s=left, label=str(token.id)
    )
    return secret


def _own(path: str) -> str:
    """Returns a path of this server; `/` for anything else."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and _is_url(path) else "/"


def _is_url(path: str) -> bool:
    with suppress(ValueError):
        return not urlsplit(path).netloc
    return False
