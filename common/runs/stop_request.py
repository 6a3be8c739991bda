"""SIGTERM and SIGINT while a run trains: the first asks it to save and leave, a second leaves at once.

Python calls a signal's handler between two of its own instructions, and a rank that waits for another in a
collective has none. So the number is read from the interpreter's wake-up descriptor by a thread.
"""

import os
import signal
import socket
import threading
import time

from common.ranks import distributed
from common.ranks.failures import say
from common.runs import run_lock

STOPPED = 75  # EX_TEMPFAIL of <sysexits.h>: the same command resumes
# A terminal's Ctrl-C reaches every rank, and the launcher passes on a signal of its own: that is one request.
SAME_REQUEST_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):  # noqa: N818  (nothing went wrong)
    """The run was asked to stop, and its state is saved; the message says where. Raised on every rank."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.name = ""
        self._asked_at = 0.0

    def install(self) -> None:
        """Take over the signals, of which a shell may have let this process ignore some."""
        mine = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        if not mine or threading.current_thread() is not threading.main_thread():
            return
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in mine:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(reading, writing), daemon=True, name="signals").start()

    def _watch(self, reading: socket.socket, writing: socket.socket) -> None:
        while writing.fileno() >= 0:
            for number in reading.recv(64):
                if number in SIGNALS:
                    self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self.name:
            self.name, self._asked_at = number.name, now
            if distributed.is_main():
                say(f"{number.name}: saving, then leaving; once more leaves at once")
        elif now - self._asked_at > SAME_REQUEST_SECONDS:
            say(f"{number.name} again: leaving at once")
            run_lock.release(128 + number)
            os._exit(128 + number)

    def is_asked_anywhere(self) -> bool:
        """Return whether any rank was asked. Every rank must call this."""
        return distributed.max_float(float(bool(self.name))) > 0
