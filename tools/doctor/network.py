"""What processes need to find one another, and whether models can be fetched. No torch in here."""

import os
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tools.findings import Finding

LAUNCHERS = ("deepspeed", "torchrun")
DEFAULT_PORT = 29500  # of both launchers
HUB = "https://huggingface.co"
_TRUE = ("1", "true", "yes", "on")


def check_launchers() -> Iterator[Finding]:
    """Say where the launchers are; those beside this Python are the right ones."""
    for name in LAUNCHERS:
        found = shutil.which(name)
        beside = Path(sys.executable).parent / name
        if found and (not beside.exists() or Path(found).resolve() == beside.resolve()):
            yield Finding(name, found, True)
        elif found:
            cure = "activate the environment of this Python"
            yield Finding(name, f"{found} is another environment's", None, cure)
        elif beside.exists():
            cure = "activate the environment, or call it by that path"
            yield Finding(name, f"{beside} is not on PATH", None, cure)
        else:
            cure = "pip install -r requirements.txt; plain python runs one process without it"
            yield Finding(name, "not found", None, cure)


def check_ports(port: int = DEFAULT_PORT) -> Iterator[Finding]:
    """Say whether processes of this machine can meet, and whether the usual port is free."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5):
                pass
    except OSError as error:
        cure = "several ranks meet there: look at firewalls and the container's network"
        yield Finding("ports", f"127.0.0.1 cannot be listened at and reached ({error})", False, cure)
        return
    try:
        socket.create_server(("127.0.0.1", port)).close()
        text, cure, is_ok = f"127.0.0.1 works, port {port} is free", "", True
    except OSError:
        text, is_ok = f"127.0.0.1 works, port {port} is in use", None
        cure = "deepspeed --master_port N, torchrun --master_port N: another run may have it"
    yield Finding("ports", text, is_ok, cure)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        yield Finding("host name", f"{name} is {address}", True)
    except OSError:
        yield Finding("host name", f"{name} has no address", None, "several machines need one: MASTER_ADDR")


def check_hub(seconds: float) -> Iterator[Finding]:
    """Say whether the model hub answers, or is not to be asked."""
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(name)]
    if offline:
        yield Finding("model hub", f"not asked ({offline[0]} is set): models and data are local", True)
        return
    if not seconds:
        yield Finding("model hub", "not asked")
        return
    # Where it is set to be a mirror, the library knows; it came with transformers, if that is here.
    address = getattr(sys.modules.get("huggingface_hub.constants"), "ENDPOINT", HUB)
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds).close()
    except urllib.error.HTTPError:
        pass  # an answer all the same
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        cure = "HF_HUB_OFFLINE=1 and local models and files need no hub"
        yield Finding("model hub", f"{address} does not answer ({reason})", None, cure)
        return
    yield Finding("model hub", f"{address} answers", True)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in _TRUE
