"""Access checks that every request passes before its route is looked up.

A web page in the user's browser can send requests to this machine. Headers that the browser writes
and no script can change give it away: Host, the name that the browser connects to (DNS rebinding
makes an attacker's name resolve to this machine), the page's Origin, and Sec-Fetch-Site. The SDK,
curl and notebooks send no Origin; their Host is the name or address that the server was started
with. A server that others can reach needs an API key, or several, in the header that the SDK sends.
URLs that are fetched without headers have a signature made with the first key, valid for a day.

Starlette's TrustedHostMiddleware takes a list of names. It supports neither all of 127.0.0.0/8, nor
each address of a server that listens on all, nor a name's trailing dot, and it reads the first of
two Host headers. Its CORSMiddleware adds headers for allowed origins, but refuses no other.
"""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from tinsmith.engine.errors import RequestError
from tinsmith.server.http.addresses import is_address, is_any
from tinsmith.server.http.error_bodies import refusal
from tinsmith.server.records.notifier import EventListener, Refused

KEY_PREFIX = "tml-"  # the SDK requires it
KEY_LENGTH_MIN = 12
WEIGHT_MIN = 1e-3  # of a key
URL_SECONDS = 86400
# Types that a form or a script may send to another origin without a preflight. curl's default,
# application/x-www-form-urlencoded, is left out: a form can't make JSON of it.
FOREIGN_TYPES = ("text/plain", "multipart/form-data")
PREFIX = "/api/v1"
OPEN = ("/", "/healthz", "/readyz", f"{PREFIX}/healthz")  # need no key
FILES = "/page/static/"  # files under it need no key either


@dataclass(frozen=True)
class Access:
    """Who may use a server. `hosts` and `origins` are allowed besides its own."""

    host: str = "127.0.0.1"
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    keys: Mapping[str, float] = field(default_factory=dict, repr=False)  # with their weights

    def __post_init__(self) -> None:
        for key, weight in self.keys.items():
            if not (
                key.startswith(KEY_PREFIX)
                and len(key) >= KEY_LENGTH_MIN
                and key.isascii()
                and key.isprintable()
                and " " not in key
            ):
                raise RequestError(
                    f"the API key must begin with {KEY_PREFIX!r}, as the SDK wants it, and have at "
                    f"least {KEY_LENGTH_MIN} visible ASCII characters"
                )
            if not WEIGHT_MIN <= weight <= 1 / WEIGHT_MIN:
                raise RequestError(
                    f"an API key's weight is from {WEIGHT_MIN:g} to {1 / WEIGHT_MIN:g}, "
                    f"{weight:g} came"
                )
        for origin in self.origins:
            parts = urlsplit(origin)
            if f"{parts.scheme}://{parts.netloc}" != origin or not parts.scheme or not parts.netloc:
                raise RequestError(
                    f"an allowed origin is like https://notebooks.example:8443, {origin!r} came"
                )

    def check_address(self, address: str) -> None:
        """Raises RequestError if others could reach a listening address and there is no key."""
        if not self.keys and not _is_loopback(address):
            raise RequestError(
                f"can't listen on {self.host} without an API key: whoever reaches it could train, "
                "download and delete; give it one with --api-key-file FILE (in Python: "
                "api_key=...), or listen on 127.0.0.1",
                "user",
            )

    # ---- requests ----

    def refusal(self, scope: Mapping[str, Any]) -> tuple[int, str] | None:
        """The status and sentence of a refusal; None if the request may pass."""
        headers = Headers(scope=scope)  # type: ignore[arg-type]
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._knows(hosts[0]):
            return 403, (
                f"this server is not known as {', '.join(hosts) or 'no host'!s}; if that is its "
                "name, start it with --allow-host NAME (in Python: allow_hosts=[...])"
            )
        origin = headers.get("origin")
        own = origin == f"{scope['scheme']}://{hosts[0]}"
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if origin is None and foreign and not _opens_page(scope, headers):
            return 403, "a web page of another origin may not use this server"
        if origin is not None and not own and origin not in self.origins:
            return 403, (
                f"web pages of {origin} may not use this server; if that is wanted, start it with "
                "--allow-origin ORIGIN (in Python: allow_origins=[...])"
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in FOREIGN_TYPES:
            return 415, f"the body must be application/json or protobuf, {kind} came"
        path = scope["path"]
        open_ = path in OPEN or path.startswith(FILES)
        if self.keys and not open_ and not self._has_key(scope):
            return 401, (
                "this server needs the API key that it was started with: set TINKER_API_KEY, or "
                "send it as X-API-Key or as Authorization: Bearer"
            )
        return None

    def _knows(self, host: str) -> bool:
        """Whether a Host header names this server: its address, the loopback, or an allowed name.
        If it listens on all addresses, any IP address does; a name could be anyone's."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        known = {"localhost", self.host.lower(), *self.hosts}
        return name in known or _is_loopback(name) or (is_any(self.host) and is_address(name))

    def _has_key(self, scope: Mapping[str, Any]) -> bool:
        given = given_key(Headers(scope=scope)).encode()  # type: ignore[arg-type]
        same = [hmac.compare_digest(given, key.encode()) for key in self.keys]
        if any(same):  # all were compared, so the time says nothing
            return True
        if scope["method"] not in ("GET", "HEAD", "PUT"):
            return False
        method = "PUT" if scope["method"] == "PUT" else "GET"
        query = parse_qs(scope["query_string"].decode("latin-1"))
        expires, signature = query.get("expires", [""])[0], query.get("signature", [""])[0]
        if not (expires.isdecimal() and len(expires) < 20 and int(expires) > time.time()):
            return False
        return hmac.compare_digest(
            self._signature(method, scope["path"], expires).encode(), signature.encode()
        )

    # ---- URLs ----

    def signed(self, url: str, method: str = "GET") -> str:
        """A URL that works without a key for a day, for a GET or a PUT."""
        if not self.keys:
            return url
        expires = str(int(time.time()) + URL_SECONDS)
        signature = self._signature(method, unquote(urlsplit(url).path), expires)
        return f"{url}?{urlencode({'expires': expires, 'signature': signature})}"

    def _signature(self, method: str, path: str, expires: str) -> str:
        text = f"{method} {path} {expires}"
        return hmac.new(next(iter(self.keys)).encode(), text.encode(), hashlib.sha256).hexdigest()


class Door:
    """ASGI middleware that refuses requests. Pages of allowed origins get the headers that let them
    read replies."""

    def __init__(self, app: Any, access: Access, notify: EventListener):
        self._access = access
        self._notify = notify
        self._app = app
        if access.origins:
            self._app = CORSMiddleware(
                app, allow_origins=sorted(access.origins), allow_methods=["*"], allow_headers=["*"]
            )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        preflight = scope["method"] == "OPTIONS" and bool(self._access.origins)
        refused = self._access.refusal(scope)
        if refused is None or (preflight and refused[0] == 401):  # a browser sends no key with it
            await self._app(scope, receive, send)
            return
        status, detail = refused
        self._notify(Refused("access", status, detail))
        await refusal(scope["path"], status, detail)(scope, receive, send)


def keys_of(given: str | Mapping[str, float] | None) -> dict[str, float]:
    """API keys with their weights, from one key or from several."""
    if given is None:
        return {}
    return {given: 1.0} if isinstance(given, str) else {k: float(w) for k, w in given.items()}


def keys_in(text: str) -> dict[str, float]:
    """API keys in a file's text: one a line, which may have its weight after it. # begins a
    comment. ValueError for a line that is neither, and if there is no key."""
    keys: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        try:
            key, weight = words if len(words) == 2 else (*words, 1.0) if words else ("", 1.0)
            if key:
                keys[key] = float(weight)
        except ValueError:
            raise ValueError(
                f"line {number} of the API keys should be a key, or a key and its weight"
            ) from None
    if not keys:
        raise ValueError("the file of API keys has none")
    return keys


def client_of(key: str) -> str:
    """The client that sends an API key, as a hash of it."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def given_key(headers: Headers) -> str:
    """The API key of a request: as the SDK and Anthropic's clients send it, or as OpenAI's do."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    return headers.get("x-api-key") or bearer


def _opens_page(scope: Mapping[str, Any], headers: Headers) -> bool:
    """Whether the user follows a link to the page, which opens in its own tab."""
    opened = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return (scope["method"], scope["path"], *opened) == ("GET", "/", "navigate", "document")


def _is_loopback(name: str) -> bool:
    address = name.partition("%")[0]
    return is_address(address) and ipaddress.ip_address(address).is_loopback
