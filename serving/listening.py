"""Where a web server of ours listens, and whom it answers. No torch in here."""

import ipaddress
import socket

from common.flags.access_token import server_token
from common.flags.args import Problems


def bind(host: str, port: int, problems: Problems) -> socket.socket | None:
    """Return a socket that is bound but does not listen yet, or None after adding why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended leaves traces
        bound.bind(address)
    except (OSError, OverflowError) as error:
        problems.add(f"--host {host} --port {port}: {error}; choose another port, 0 for any free one")
        return None
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether no other machine reaches a bound socket: by its address, for a name may lead anywhere."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def find_token(token_file: str, problems: Problems) -> str:
    """Return the token that requests must bear, empty for none, after adding what is wrong with it."""
    try:
        return server_token(token_file)
    except ValueError as error:
        problems.add(str(error))
        return ""
