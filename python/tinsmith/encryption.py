"""Files encrypted with age (age-encryption.org) to the public keys that a client names, by pyrage.

A recipient is an age key (age1…) or an SSH public key. What is encrypted is the client's to
decrypt, `age -d -i identity file.age`: no private key is ever here.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUFFIX = ".age"
RECIPIENTS_MAX = 10


def check(recipients: Sequence[Any]) -> tuple[str, ...]:
    """The recipients, if they can be encrypted to; ValueError says which can't, and why."""
    if len(recipients) > RECIPIENTS_MAX:
        raise ValueError(
            f"age_encryption_recipients has {len(recipients)} keys; at most {RECIPIENTS_MAX}"
        )
    for recipient in recipients:
        _key(recipient)
    return tuple(recipients)


def encrypt(file: Path, recipients: Sequence[str]) -> Path:
    """Replaces a file by its encrypted one, beside it, with the suffix; it is on disk then."""
    target = file.with_name(file.name + SUFFIX)
    _pyrage().encrypt_file(str(file), str(target), [_key(one) for one in recipients])
    with target.open("rb") as written:
        os.fsync(written.fileno())
    file.unlink()
    return target


def _pyrage() -> Any:
    try:
        import pyrage
    except ImportError:
        raise ValueError(
            "age encryption needs the server to have pyrage: pip install 'tinsmith[server]'; "
            "or leave age_encryption_recipients out"
        ) from None
    return pyrage


def _key(recipient: Any) -> Any:
    pyrage = _pyrage()
    if not isinstance(recipient, str):
        raise ValueError(f"an age recipient must be a string, {recipient!r:.60} came")
    kind = pyrage.ssh if recipient.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(recipient)
    except Exception as error:  # pyrage's own, which derives from Exception alone
        raise ValueError(
            f"{recipient!r:.60} is no age recipient (age1... or an SSH public key): {error}"
        ) from None
