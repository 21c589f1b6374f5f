"""Numbers as people read them."""


def readable(count: int) -> str:
    """A number of bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def counted(count: int, thing: str, things: str = "") -> str:
    """A number of things, whose plural may be one of its own."""
    return f"{count} {thing if count == 1 else things or thing + 's'}"
