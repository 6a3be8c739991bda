"""What a thread tells, as an asynchronous stream: a web server sends it on while the thread works."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

Emit = Callable[[Any], None]
Work = Callable[[Emit, threading.Event], None]  # is told, by the event, when nobody listens any more
_END = object()


class WorkFailed(Exception):
    """The thread ended with an error; it is the cause."""


async def stream_from_thread(work: Work) -> AsyncIterator[Any]:
    """Yield what `work` emits, in order, until it returns.

    Whoever stops listening sets the event that `work` is given. Raises WorkFailed after the last item.
    """
    loop, items = asyncio.get_running_loop(), asyncio.Queue[Any]()
    is_gone = threading.Event()

    def put(item: Any) -> None:
        if not is_gone.is_set():
            try:
                loop.call_soon_threadsafe(items.put_nowait, item)
            except RuntimeError:  # the server has ended, and its loop with it
                is_gone.set()

    def run() -> None:
        try:
            work(put, is_gone)
        except Exception as error:
            put(WorkFailed(str(error) or type(error).__name__))
        put(_END)

    threading.Thread(target=run, daemon=True, name="answers").start()
    try:
        while (item := await items.get()) is not _END:
            if isinstance(item, WorkFailed):
                raise item
            yield item
    finally:
        is_gone.set()
