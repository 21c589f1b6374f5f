"""Error bodies of each API: Tinker's {"detail": …}, OpenAI's and Anthropic's {"error": …}.

The path says which API was called. SHAPES is the table: the first row whose prefix matches.
"""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith.engine.errors import clipped
from tinsmith.system import disk

# The hosted service's prefixes, and the usual ones.
OPENAI_PREFIXES = ("/oai/api/v1", "/v1")
ANTHROPIC_PREFIXES = ("/anthropic/api/v1", "/v1")
SERVERLESS = "/training/v1/serverless"  # after a server's URL, as Fireworks' clients write it
FIREWORKS_PREFIXES = ("/inference/v1", f"{SERVERLESS}/inference/v1")


def tinker(status: int, sentence: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Tinker's body."""
    return {"detail": sentence}


_OPENAI = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_OPENAI_OTHERS = (("invalid_request_error", None), ("server_error", None))


def openai(status: int, sentence: str, param: str | None, code: str | None) -> dict[str, Any]:
    """https://platform.openai.com/docs/guides/error-codes"""
    kind, usual = _OPENAI.get(status, _OPENAI_OTHERS[status >= 500])
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code or usual}}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic(status: int, sentence: str, param: str | None, code: str | None) -> dict[str, Any]:
    """https://docs.anthropic.com/en/api/errors"""
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": sentence}}


Shape = Callable[[int, str, str | None, str | None], dict[str, Any]]
SHAPES: tuple[tuple[str, Shape], ...] = (
    ("/anthropic/api", anthropic),
    ("/v1/messages", anthropic),
    *((prefix, openai) for prefix in (*OPENAI_PREFIXES, *FIREWORKS_PREFIXES)),
    ("", tinker),
)


def status_of(error: Exception) -> int:
    """The status for a failure without its own: 507 if the disk is full, otherwise 400."""
    return 507 if getattr(error, "errno", None) in disk.FULL else 400


def refusal(
    path: str,
    status: int,
    sentence: str,
    headers: Mapping[str, str] | None = None,
    error: Exception | None = None,
) -> Response:
    """The reply that refuses a request to a path."""
    shape = next(row[1] for row in SHAPES if path == row[0] or path.startswith(f"{row[0]}/"))
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    content = shape(status, clipped(sentence), param, code)
    return JSONResponse(content, status_code=status, headers=headers)
