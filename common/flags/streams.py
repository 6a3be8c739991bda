"""Robust standard streams: a program survives streams that are closed, full, unread or not in UTF-8.
Does not import torch."""

import contextlib
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


class _DroppingOutput(io.FileIO):
    """A file that drops output that cannot be written, and reports that once unless its reader has closed."""

    is_lost = False

    def write(self, data: bytes) -> int:
        """Number of bytes of `data` that were written or dropped."""
        try:
            return super().write(data)
        except OSError as error:
            if not self.is_lost and error.errno != errno.EPIPE:
                name = "standard output" if self.fileno() == 1 else "standard error"
                self.is_lost = True
                with contextlib.suppress(OSError):
                    os.write(3 - self.fileno(), f"{name} cannot be written: {error.strerror}\n".encode())
            return len(data)


class _UncloseableText(io.TextIOWrapper):
    """A stream that user functions cannot close."""

    def close(self) -> None:
        """Flush the stream."""
        self.flush()


def harden_streams() -> None:
    """Make standard input, output and error usable in any state; every program calls this first.

    A closed stream becomes the null device, output that cannot be written is dropped, and characters that the
    encoding lacks are escaped. Streams that a caller has replaced, as tests do, are kept.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # else another file would get number 0, 1 or 2
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
        uncloseable = _UncloseableText(
            io.BufferedWriter(_DroppingOutput(number, "w", closefd=False)),
            encoding=getattr(stream, "encoding", None) or "utf-8",
            errors="backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, uncloseable)


def _exit_at_once(*_: Any) -> None:
    os._exit(130)


def exit_at_ctrl_c(handler: Callable[..., None] = _exit_at_once) -> None:
    """Let Ctrl-C call a handler that ends the process, unless a shell ignores it. The default says nothing
    and holds until `keep_imports`: a KeyboardInterrupt in an import would print a traceback of its library.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)


def keep_imports() -> None:
    """Exempt what the imports made from garbage collection, which `begin_tool` turns off until here: it lives
    until the end, and the collections there would take longer than many a program's work. Ctrl-C raises
    KeyboardInterrupt again.
    """
    gc.freeze()
    gc.enable()
    if signal.getsignal(signal.SIGINT) is _exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_tool(main: Callable[[], Any]) -> None:
    """Run a tool's main function and exit with the code that it returns; Ctrl-C ends it with one line."""
    harden_streams()
    keep_imports()
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
