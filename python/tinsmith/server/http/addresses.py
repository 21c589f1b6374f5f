"""The addresses at which a server can be reached. If it listens on all of the machine's addresses,
the kernel lists those of its network interfaces."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux
INET6 = Path("/proc/net/if_inet6")
GLOBAL = "00"  # the scope there of an address that other machines can reach


def reached(host: str, own: str) -> list[str]:
    """The URLs at which others reach a server that listens on `host` and has the URL `own`: that
    URL, or one for each of the machine's addresses."""
    if not is_any(host):
        return [own]
    found = [*_version4(), *(_version6() if ":" in host else ())]
    port = urlsplit(own).port or 80
    return [url(one, port) for one in found] or [own]


def url(host: str, port: int) -> str:
    """The URL of a server that listens on a host."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_address(name: str) -> bool:
    """Whether a host is an IP address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def is_any(name: str) -> bool:
    """Whether a host means all of the machine's addresses."""
    return name == "" or (is_address(name) and ipaddress.ip_address(name).is_unspecified)


def _version4() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                told = fcntl.ioctl(asked, ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
    return [one for one in found if not ipaddress.ip_address(one).is_loopback]


def _version6() -> list[str]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in INET6.read_text().splitlines()]
        return [str(ipaddress.ip_address(bytes.fromhex(r[0]))) for r in rows if r[3] == GLOBAL]
    return []
