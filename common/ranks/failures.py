"""Skipped steps; classification of exceptions: out of memory, or other ranks lost. PURE."""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
NO_ROOM = ("No space left", "Disk quota exceeded", "File too large")
line_start = b""  # of a message: it may erase a progress bar
COMMUNICATION = ("/gloo/", "gloo::", "NCCL error", "ncclRemoteError", "ncclSystemError")


class StepSkipped(RuntimeError):
    """A step was skipped before anything was changed; the message names the cause and the cure.

    Raised on every rank. `batches` is the data of the step, if known.
    """

    def __init__(self, message: str, batches: list[Any] | None = None) -> None:
        super().__init__(message)
        self.batches = batches or []


class TooManyBadSteps(RuntimeError):
    """More steps were skipped than --max_bad_steps: the run ends with its state saved."""


def say(text: str) -> None:
    """Write a line to standard error at once; another thread may hold sys.stderr's lock.

    The line is lost if the stream has no reader: a signal to the whole process group also ends `| tee log`.
    """
    with contextlib.suppress(OSError):
        os.write(2, line_start + f"{text}\n".encode(errors="replace"))


def first_line(error: BaseException, otherwise: str = "") -> str:
    """First line of an exception's message, with the next one if the first ends in a colon; without a message
    `otherwise`, or the exception's class.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [otherwise or type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def kind_and_line(error: BaseException) -> str:
    """Class and first line of an exception."""
    kind = type(error).__name__
    text = first_line(error)
    return kind if text == kind else f"{kind}: {text}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or the GPU ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def cure_of_write(error: BaseException) -> str:
    """Cure for a file that could not be written."""
    if isinstance(error, PermissionError) or "Permission denied" in str(error):
        return "get write permission there"
    if any(words in str(error) for words in NO_ROOM):
        return "make room"
    return "check the disk"


def has_lost_ranks(error: BaseException | None) -> bool:
    """Whether the exception (or its cause) means that another rank was lost."""
    while error is not None:
        is_of_backend = isinstance(error, RuntimeError) and any(w in str(error) for w in COMMUNICATION)
        if isinstance(error, dist.DistError) or is_of_backend:
            return True
        error = error.__cause__ or error.__context__
    return False
