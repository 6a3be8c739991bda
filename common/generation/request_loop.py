"""Requests of several threads, generated together: their responses enter and leave the slots between passes.

There is no thread for it: one of the threads that wait for their responses runs the passes for all, until
its own are complete; then another one goes on.

# m samples of a pass, V vocabulary
"""

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from common.data.packed_batch import pad_rows
from common.generation import generate
from common.generation.decode import DecodeStep, SamplingOptions
from common.models.sampling import Sample
from common.ranks.failures import first_line, is_out_of_memory, say

_MAX_SAMPLES = 2**20  # per request: sample s belongs to the request s // _MAX_SAMPLES of a loop
_MAX_REQUESTS = 1000  # that a loop keeps; the next one waits until all of them have ended
_next_lock = threading.Lock()
_device_lock = threading.Lock()


@contextlib.contextmanager
def device_turn() -> Iterator[None]:
    """Context in which no other thread computes, for one pass of any model.

    A thread that leaves it and returns at once queues behind the one that waits and has `_next_lock`.
    """
    with _next_lock:
        _device_lock.acquire()
    try:
        yield
    finally:
        _device_lock.release()


@dataclass(eq=False)
class Request:
    """A prompt, and what becomes of its responses."""

    prompt_ids: list[int]
    sample_ids: list[int]  # keys of the random numbers, one per response
    options: SamplingOptions
    on_token: Callable[[int, int], bool]  # receives (index of a response, its next token); True ends it
    num_open: int  # responses that have not ended
    error: Exception | None = None  # the reason why they ended early


class _RequestLoop(generate.DecodeLoop):
    """Passes from the first of several requests to the last token of all."""

    def __init__(self, step: DecodeStep) -> None:
        nothing = torch.empty(0, 1, dtype=torch.int64, device=step.state.lengths.device)
        schedule = generate.SlotSchedule(
            [],
            num_samples=_MAX_SAMPLES,
            num_slots=step.cache.num_slots,
            max_tokens_per_pass=generate.PREFILL_TOKENS,
            max_padding_per_pass=generate.PADDING_WORTH_A_PASS[nothing.device.type],
        )
        batch = generate.PromptBatch(nothing, nothing, nothing[:, 0])
        super().__init__(step, schedule, batch, None, self._deliver, None)
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Let a request wait for slots, behind the earlier ones."""
        first = len(self.requests) * _MAX_SAMPLES
        self.requests.append(request)
        self.schedule.prompt_lengths.append(len(request.prompt_ids))
        self.schedule.waiting.extend(range(first, first + request.num_open))

    def _owners(self, samples: Sequence[int]) -> list[Request]:
        return [self.requests[sample // _MAX_SAMPLES] for sample in samples]

    def _locate(self, admission: generate.Admission) -> tuple[generate.PromptBatch, Any, Any, torch.Tensor]:
        prompts = [self.requests[prompt].prompt_ids for prompt in admission.prompts] or [[0]]
        samples = [
            (request.sample_ids[sample % _MAX_SAMPLES], request.options.max_new_tokens, request.options.seed)
            for sample, request in zip(admission.samples, self._owners(admission.samples), strict=True)
        ]
        ids, mask = (x.to(self.device) for x in pad_rows(prompts, 0, on_left=True))
        sample_ids, limits, seeds = torch.tensor(samples).to(self.device).split(1, 1)
        batch = generate.PromptBatch(ids, mask, sample_ids.squeeze(1), limits.squeeze(1))
        return batch, range(len(admission.prompts)), range(len(samples)), seeds

    def _decode(self) -> None:
        super()._decode()
        num_rows = len(self.lengths)
        self._sample(slice(0, num_rows), self.step.logits[:num_rows])

    def _sample(self, slots: slice, logits: torch.Tensor) -> None:
        """Sample from logits (m, V) by each request's options; neighbours with equal ones together."""
        uniforms = self.step.state.next_uniforms(slots)
        owners = self._owners(self.schedule.slots[slots])
        samples = []
        end = 0
        for options, group in groupby(
            dataclasses.replace(o.options, seed=0, max_new_tokens=0) for o in owners
        ):
            first = end
            end += len(list(group))
            samples.append(options.sample(logits[first:end], uniforms[first:end]))
        sample = Sample(*map(torch.cat, zip(*samples, strict=True)))
        self.step.state.append(slots, sample, options.stop_token_id)

    def _deliver(self, sample: int, token_ids: list[int]) -> bool:
        """Pass a token on; return whether its response ends. An error ends the responses of one request."""
        [request] = self._owners([sample])
        try:
            return request.error is not None or request.on_token(sample % _MAX_SAMPLES, token_ids[0])
        except Exception as error:
            request.error = error
            return True

    def _collect(self, ended: list[int], samples: torch.Tensor, slots: torch.Tensor) -> None:
        for request in self._owners(ended):
            request.num_open -= 1


class SharedGenerator:
    """Generates for several threads, in `max_slots` slots of up to `max_length` tokens.

    The cache grows with the longest request, when no sequence is in a slot.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_slots: int,
        max_length: int,
        max_new_tokens: int,
        use_cuda_graphs: bool = True,
    ) -> None:
        """`model` is in eval mode."""
        self.generator = generate.Generator(model, use_cuda_graphs=use_cuda_graphs)
        self.max_slots = max_slots
        self.max_length = max_length
        self.max_new_tokens = max_new_tokens
        self._device = next(model.parameters()).device
        self._queue: deque[Request] = deque()
        self._loop: _RequestLoop | None = None
        self._changed = threading.Condition()  # responses have ended, or no thread runs the passes
        self._has_runner = False

    def run(self, request: Request) -> None:
        """Wait for the responses to a request. Raises the error that ended them."""
        self._queue.append(request)
        with self._changed:
            self._changed.wait_for(lambda: request.num_open == 0 or not self._has_runner)
            is_runner = request.num_open > 0
            self._has_runner |= is_runner
        try:
            while request.num_open:
                self._advance()
        finally:
            if is_runner:
                with self._changed:
                    self._has_runner = False
                    self._changed.notify_all()
        if request.error:
            raise request.error

    @torch.inference_mode()
    def _advance(self) -> None:
        """Run one pass; wake the threads whose responses have ended."""
        has_ended = True
        with device_turn():
            try:
                self._take_requests()
                has_ended = self._loop.advance()
            except Exception as error:  # of device or library
                self._fail(error)
        if has_ended:
            with self._changed:
                self._changed.notify_all()

    def _take_requests(self) -> None:
        """Let requests wait for slots, first come first served; those that need a larger cache, or a new
        loop, wait for the end of the others.
        """
        while self._queue:
            request = self._queue[0]
            num_tokens = len(request.prompt_ids) + self.max_new_tokens
            # Powers of two, so that few requests allocate a new cache.
            length = min(1 << (num_tokens - 1).bit_length(), self.max_length)
            loop = self._loop
            if loop is None or not (loop.schedule.waiting or loop.schedule.slots):
                step = self.generator.prepare(self.max_slots, length, self.max_new_tokens, self._device)
                step.begin(None)
                loop = self._loop = _RequestLoop(step)
            if length > loop.step.cache.max_length or len(loop.requests) == _MAX_REQUESTS:
                break
            loop.add(self._queue.popleft())

    def _fail(self, error: Exception) -> None:
        """End the requests of a failed pass with its error, and start with an empty cache."""
        requests = getattr(self._loop, "requests", ())  # none if it could not be built
        failed = [request for request in requests if request.num_open] or [self._queue.popleft()]
        message = f"generation failed for {len(failed)} request(s): {first_line(error)}"
        if is_out_of_memory(error):
            self.max_slots = max(self.max_slots // 2, 1)
            message += f"; ask again: at most {self.max_slots} responses are generated at once from now on"
        say(f"error: {message}")
        self._loop = None
        self.generator.release()
        for request in failed:
            request.error = RuntimeError(message)
            request.num_open = 0
