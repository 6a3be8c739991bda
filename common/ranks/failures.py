"""Skipped steps; classification of exceptions: out of memory, or other ranks lost. PURE."""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
NO_ROOM = ("No space left", "Disk quota exceeded", "File too large")
COMMUNICATION = ("/gloo/", "gloo::", "NCCL error", "ncclRemoteError", "ncclSystemError")


class StepRefused(RuntimeError):
    """A step was refused before anything was changed; the message names the cause and the cure.

    Every rank raises it alike. `batches` is what the step was to be made of, where that is known.
    """

    def __init__(self, message: str, batches: list[Any] | None = None) -> None:
        super().__init__(message)
        self.batches = batches or []


class TooManyBadSteps(RuntimeError):
    """More steps were refused than --max_bad_steps: the run ends with its state saved."""


def say(text: str) -> None:
    """Write a line to standard error at once: another thread may hold sys.stderr's lock.

    It is lost where nobody reads any more: a signal for the whole process group ends `| tee log` too.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def first_line(error: BaseException, otherwise: str = "") -> str:
    """Return the first line of what an exception says, and the next where that ends in a colon; of one that
    says nothing `otherwise`, or its kind.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [otherwise or type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def kind_and_line(error: BaseException) -> str:
    """Return an exception's kind and the first line of what it says."""
    kind, text = type(error).__name__, first_line(error)
    return kind if text == kind else f"{kind}: {text}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, of the machine or of the GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def cure_of_write(error: BaseException) -> str:
    """What a user can do about a file that could not be written."""
    if isinstance(error, PermissionError) or "Permission denied" in str(error):
        return "get the right to write there"
    if any(words in str(error) for words in NO_ROOM):
        return "make room"
    return "see what the disk says"


def has_lost_ranks(error: BaseException | None) -> bool:
    """Return whether this rank has lost others, by this exception or one that led to it."""
    while error is not None:
        is_of_backend = isinstance(error, RuntimeError) and any(w in str(error) for w in COMMUNICATION)
        if isinstance(error, dist.DistError) or is_of_backend:
            return True
        error = error.__cause__ or error.__context__
    return False
