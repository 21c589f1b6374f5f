"""Numbers formatted for people."""


def readable(count: int) -> str:
    """A number of bytes."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def counted(count: int, thing: str, things: str = "") -> str:
    """A number of things; the plural may be irregular."""
    return f"{count} {thing if count == 1 else things or thing + 's'}"
