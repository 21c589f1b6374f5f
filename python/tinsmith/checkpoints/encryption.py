"""Exports that only their owner can read: files encrypted with age to public keys.

The cookbook's weights.download uses it: it exports a training state to its own key and decrypts
what it has fetched. The format is that of pyrage, age's library; the private key never comes here.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.system import disk

SUFFIX = ".age"
RECIPIENTS_MAX = 10
CHUNK_BYTES, TAG_BYTES = 1 << 16, 16  # age's: the chunk that is authenticated at once, and its tag
HEADER_BYTES = 4096  # of an encrypted file, besides two lengths of each key


def recipients(keys: Sequence[Any]) -> tuple[str, ...]:
    """The public keys, checked: age's own (age1…) or SSH's. ValueError with a sentence."""
    if len(keys) > RECIPIENTS_MAX:
        raise ValueError(f"at most {RECIPIENTS_MAX} age recipients are allowed, {len(keys)} came")
    for key in keys:
        _read(key)
    return tuple(keys)


def seal(folder: Path, names: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Replaces files by encrypted ones, synced; any key's identity decrypts them.

    Returns their names, which end in .age; without keys it does nothing.
    """
    if not keys:
        return list(names)
    import pyrage

    readers = [_read(key) for key in keys]
    for name in names:
        sealed = folder / (name + SUFFIX)
        pyrage.encrypt_file(str(folder / name), str(sealed), readers)
        with sealed.open("rb+") as file:
            os.fchmod(file.fileno(), disk.FILE_MODE)
            os.fsync(file.fileno())
        (folder / name).unlink()
    return [name + SUFFIX for name in names]


def sealed_size(size: int, keys: Sequence[str]) -> int:
    """An upper bound of a file's size after encryption."""
    if not keys:
        return size
    chunks = size // CHUNK_BYTES + 1
    return size + chunks * TAG_BYTES + HEADER_BYTES + sum(2 * len(key) for key in keys)


def _read(key: Any) -> Any:
    try:
        import pyrage
    except ImportError:
        raise ValueError("age encryption needs pyrage: pip install pyrage") from None
    kind = pyrage.ssh if isinstance(key, str) and key.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(key)
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # from pyrage's Rust; not an Exception
        if not (panic or isinstance(error, pyrage.RecipientError | TypeError)):
            raise
        raise ValueError(f"{key!r:.80} is not a public key for age: {error}") from None
