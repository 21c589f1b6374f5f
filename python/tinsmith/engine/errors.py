"""How a request's failure is reported: a sentence, and whether the user or the server is at fault.

Every exception that a request raises becomes a RequestError here. Only this module knows which
exceptions mean bad input ("user") and which mean that the machine failed ("server"). An exception
in neither list is a bug: it is logged with its traceback and reported as a bug.
"""

import logging

log = logging.getLogger("tinsmith")

USER = (ValueError, IndexError, FloatingPointError, FileNotFoundError, FileExistsError)
SERVER = (MemoryError, OSError, RuntimeError)
# What a client should do if its run ended with its server.
GO_ON = "go on from the last save_state with create_training_client_from_state_with_optimizer"
SENTENCE_MAX = 2000  # characters of a sentence for a client; it may quote the client's input


class RequestError(Exception):
    """A failed request: str() is the sentence for the client, `errno` the system's error number."""

    def __init__(self, message: str, category: str = "user", errno: int | None = None):
        super().__init__(message)
        self.category = category
        self.errno = errno


def sentence(error: BaseException) -> str:
    """An exception's message, without the number that Python puts before an OSError's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def clipped(text: str) -> str:
    """A sentence of bounded length, with only characters that can be sent."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= SENTENCE_MAX else f"{text[:SENTENCE_MAX]} ..."


def explain(error: BaseException) -> RequestError:
    """Turns an exception into a RequestError."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, USER):
        return RequestError(sentence(error), "user")
    if isinstance(error, SERVER) and str(error):
        return RequestError(sentence(error), "server", getattr(error, "errno", None))
    log.error("a request failed unexpectedly", exc_info=error)
    kind = type(error).__name__
    return RequestError(f"unexpected {kind} in the server, a bug: {error}", "server")
