"""Which network interface of this machine has an address: NCCL is told interfaces, and links know addresses."""

import ipaddress
import socket
import struct
import sys
from pathlib import Path

from openinfer_core import Refused

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IFREQ_BYTES = 40
_NAME_BYTES = 16
_ADDRESS_AT = 20  # of `struct ifreq`: the name, family and port before it
_IPV6_TABLE = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str:
    """The name of the interface that has an IP address.

    Raises:
        Refused: none has it, or the system does not say.
    """
    found = _find(address) if sys.platform == "linux" else None
    if found is None:
        raise Refused(
            f"no network interface of this machine is known to have the address {address}, by which ranks reach each "
            "other: name one in NCCL_SOCKET_IFNAME"
        )
    return found


def _find(address: str) -> str | None:
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    if wanted.version == 4:
        return next((name for name in names if _ipv4_of(name) == wanted), None)
    return next((name for found, name in _ipv6_addresses() if found == wanted), None)


def _ipv4_of(interface: str) -> ipaddress.IPv4Address | None:
    import fcntl  # not on every system

    request = struct.pack(f"{_IFREQ_BYTES}s", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return ipaddress.IPv4Address(answer[_ADDRESS_AT : _ADDRESS_AT + 4])


def _ipv6_addresses() -> list[tuple[ipaddress.IPv6Address, str]]:
    try:
        rows = [line.split() for line in _IPV6_TABLE.read_text("ascii").splitlines()]
    except OSError:
        return []
    return [(ipaddress.IPv6Address(bytes.fromhex(row[0])), row[-1]) for row in rows]
