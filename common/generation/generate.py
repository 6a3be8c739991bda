"""Sampling from a causal LM with continuous batching over a fixed number of slots.

The text of a sample depends only on (seed, sample id, prompt) and the weights: not on slots, order, batch or
ranks.

# B prompts, N samples per prompt, P prompt tokens, R response tokens, S slots, m new rows, V vocabulary
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from common.generation.decode import DecodeGraphs, DecodeState, DecodeStep, SamplingOptions
from common.generation.kv_cache import PADDING_WORTH_A_PASS, Admission, SlotCache, SlotSchedule
from common.models import exact
from common.ranks import passes
from common.ranks.passes import PassProgress

# Called with (sample, [its new token id]) after each pass; returns True to end the sample.
TokenCallback = Callable[[int, list[int]], bool]
# Called with (sample, its response so far) of all samples that ended a turn with the stop token; returns for
# each the token ids of the environment's reply, after which it continues, or None to end the response.
TurnCallback = Callable[[list[tuple[int, list[int]]]], list[list[int] | None]]

DEFAULT_SLOTS = 128
PREFILL_TOKENS = 4096  # prompt tokens per prefill pass: more would only use memory


class PromptBatch(NamedTuple):
    """Prompts and their samples, B' = B x N; the samples of a prompt are adjacent."""

    prompt_ids: torch.Tensor  # (B, P) int64, left-padded
    prompt_mask: torch.Tensor  # (B, P) True for real tokens
    sample_ids: torch.Tensor  # (B',) int64, keys of the random numbers
    limits: torch.Tensor | None = None  # (B',) int64, maximum response tokens, from 1 to max_new_tokens

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return len(self.sample_ids) // len(self.prompt_ids)


class Generation(NamedTuple):
    """Responses to the right of their prompts, grouped by prompt; B' = B x N."""

    response_ids: torch.Tensor  # (B', R) int64, pad_token_id after the end
    response_mask: torch.Tensor  # (B', R) bool, True for tokens of the response, the stop token included
    logprobs: torch.Tensor  # (B', R) fp32, untruncated distribution at this temperature; 0 after the end
    truncated_logprobs: torch.Tensor  # (B', R) fp32, distribution after top_k and top_p; 0 after the end
    is_finished: torch.Tensor  # (B',) bool, False if the limit truncated the response
    sampled_mask: torch.Tensor  # (B', R) bool, `response_mask` without the environment's tokens


class Generator:
    """Generates with one model; keeps its key/value cache and captured graphs between calls.

    `model` is in eval mode, with whole weights or this rank's slices. A slot has room for `max_length` tokens
    of prompt and response, or more if a call needs more. `agree_any` is for a model whose forward pass needs
    all ranks (sharded weights): it returns whether any rank still has work. Ranks without work then run dummy
    passes, so that the weights can be gathered, and CUDA graphs are off: they cannot contain the gathers.
    `tp_group`: the ranks that hold the slices of a tensor-parallel model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_slots: int = 0,
        max_length: int = 0,
        agree_any: Callable[[bool], float] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        use_cuda_graphs: bool = True,
    ) -> None:
        self.model, self.agree_any = model, agree_any
        self.num_slots, self.max_length = num_slots, max_length
        # In a pass of a tensor-parallel model all its ranks take part, and they agree on nothing else.
        self.can_leave = tp_group is None or agree_any is not None
        self._step: DecodeStep | None = None
        self._graphs = DecodeGraphs(model, tp_group) if use_cuda_graphs and agree_any is None else None

    @property
    def has_graphs(self) -> bool:
        """Whether there are captured graphs, which read the weights at fixed addresses."""
        return self._graphs is not None and bool(self._graphs.graphs)

    def release(self) -> None:
        """Free the memory of keys, values and graphs."""
        self._step = None
        if self._graphs:
            self._graphs.release()

    def generate(
        self,
        batch: PromptBatch,
        options: SamplingOptions,
        *,
        on_tokens: TokenCallback | None = None,
        on_turns: TurnCallback | None = None,
    ) -> Generation:
        """Responses of all samples.

        A response ends with its stop token; its length is counted, not found by search, so the stop token may
        be the pad token. `on_tokens` receives every token as soon as it is sampled, and may end a response.
        `on_turns` may continue a response after the environment's reply, whose tokens enter the cache one per
        pass, while other slots sample; the limit applies to all turns together.
        """
        if batch.limits is None:
            batch = batch._replace(limits=torch.full_like(batch.sample_ids, options.max_new_tokens))
        device = batch.prompt_ids.device
        lengths = batch.prompt_mask.long().sum(1).tolist()
        num_slots = min(self.num_slots or DEFAULT_SLOTS, len(batch.sample_ids))
        schedule = SlotSchedule(
            lengths,
            num_samples=batch.num_samples,
            num_slots=num_slots,
            max_tokens_per_pass=PREFILL_TOKENS,
            max_padding_per_pass=PADDING_WORTH_A_PASS[device.type] * (not exact.is_on()),
        )
        length = max(max(lengths) + options.max_new_tokens, self.max_length)
        # Inference mode is 10% faster on a CPU; DeepSpeed's gathering hooks do not run in it.
        with torch.no_grad() if self.agree_any else torch.inference_mode():
            step = self.prepare(num_slots, length, options.max_new_tokens, device)
            step.begin(options)
            loop = DecodeLoop(step, schedule, batch, self.agree_any, on_tokens, on_turns)
            tensors = loop.run(can_leave=self.can_leave)
        return Generation(*(tensor.clone() for tensor in tensors))  # a loss cannot use inference tensors

    def prepare(self, num_slots: int, length: int, max_new_tokens: int, device: torch.device) -> DecodeStep:
        """The step, with a cache of at least this size."""
        if self._step is None or not self._step.has_room(num_slots, length, max_new_tokens):
            self.release()  # free the memory before the new allocation
            state = DecodeState.build(num_slots, max_new_tokens, device)
            self._step = DecodeStep(self.model, SlotCache(num_slots, length), state, self._graphs)
        return self._step


class DecodeLoop:
    """One call of `generate`, from the first prompt to the last token."""

    def __init__(
        self,
        step: DecodeStep,
        schedule: SlotSchedule,
        batch: PromptBatch,
        agree_any: Callable[[bool], float] | None,
        on_tokens: TokenCallback | None,
        on_turns: TurnCallback | None,
    ) -> None:
        """The arguments are those of `Generator`; `step.begin` has been called with the sampling options."""
        self.step = step
        self.schedule = schedule
        self.batch = batch
        self.agree_any = agree_any
        self.on_tokens = on_tokens
        self.on_turns = on_turns
        self.device = batch.prompt_ids.device
        self.results = DecodeState.build(len(batch.sample_ids), step.state.max_new_tokens, self.device)
        self.lengths: list[int] = []  # tokens in the cache, per slot
        self.first_logits: dict[int, torch.Tensor] = {}  # of prompts with waiting samples
        self.num_streamed: dict[int, int] = {}  # tokens passed to `on_tokens`, by sample

    def run(self, *, can_leave: bool) -> Generation:
        """Run until no sample waits; return all responses in the order of the samples.

        Raises Interrupted on all ranks after a request to stop, at once on a rank that `can_leave` the loop.
        """
        agree_any = self.agree_any or bool
        num_samples = len(self.batch.sample_ids)
        progress = PassProgress(num_samples, "responses")
        while agree_any(
            bool(self.schedule.waiting or self.schedule.slots) and not (can_leave and passes.is_asked())
        ):
            if self.advance():
                progress.show(num_samples - len(self.schedule.waiting) - len(self.schedule.slots))
        passes.leave_if_asked()
        return collect_responses(self.results, self.step.options)

    def advance(self) -> bool:
        """Run one pass; return whether samples have left their slots."""
        if self.schedule.should_admit():
            self._admit(self.schedule.admit())
        elif self.schedule.slots:
            self._decode()
        else:
            self._run_dummy_pass()
        finished = self._finished_slots()
        if self.on_turns and finished:
            samples = {slot: self.schedule.slots[slot] for slot in finished}
            continued = continue_turns(self.step.state, samples, self.on_turns)
            finished = [slot for slot in finished if slot not in continued]
        if finished:
            self._retire(finished)
        return bool(finished)

    def _locate(self, admission: Admission) -> tuple[PromptBatch, Sequence[int], Sequence[int], Any]:
        """(A batch, rows of the new prompts in it, rows of the new samples, seed or seeds (m, 1))."""
        return self.batch, admission.prompts, admission.samples, self.step.options.seed

    def _sample(self, slots: slice, logits: torch.Tensor) -> None:
        """Sample the next tokens from logits (m, V)."""
        self.step.state.sample(slots, logits, self.step.options)

    def _admit(self, admission: Admission) -> None:
        """Prefill the new prompts, copy their cache to the other samples, and sample every first token."""
        new = admission.prompts
        schedule = self.schedule
        prompts = [sample // schedule.num_samples for sample in admission.samples]
        lengths = [schedule.prompt_lengths[prompt] for prompt in prompts]
        batch, rows, samples, seed = self._locate(admission)
        rows, slots, samples, prompt_lengths, sources, targets = self._to_device(
            rows, admission.prompt_slots, samples, lengths, *_columns(admission.copies)
        )
        if new:
            widths = [schedule.prompt_lengths[prompt] for prompt in new]
            width = max(widths)
            has_padding = min(widths) < max(widths)
            ids = batch.prompt_ids[rows, -width:]
            mask = batch.prompt_mask[rows, -width:].bool()
            logits = self.step.prefill(ids, mask, slots, has_padding)  # (m, V)
            self.first_logits.update(zip(new, logits, strict=True))
        elif self.agree_any:
            self._run_dummy_pass()  # joins the other ranks' pass
        if admission.copies:
            self.step.cache.copy_slots(sources, targets, max(lengths))
        state = self.step.state
        first = len(self.lengths)
        state.enter(first, prompt_lengths, batch.limits[samples], batch.sample_ids[samples], seed)
        self.lengths += lengths
        logits = torch.stack([self.first_logits[prompt] for prompt in prompts])
        self._sample(slice(first, len(self.lengths)), logits)
        for prompt in set(prompts):
            if not schedule.has_waiting_sibling(prompt):
                del self.first_logits[prompt]

    def _to_device(self, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Each column as (n,) int64 on the device, by one asynchronous copy from pinned memory."""
        numbers = torch.tensor([*chain(*columns)], dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return numbers.to(self.device, non_blocking=True).split([len(column) for column in columns])

    def _decode(self) -> None:
        num_passes = 1 if self.agree_any or self.on_tokens else self.step.passes_per_check
        for _ in range(num_passes):
            # A sequence that finishes between checks keeps its slot: `lengths` are upper bounds.
            self.step.run(len(self.lengths), min(max(self.lengths) + 1, self.step.cache.max_length))
            self.lengths = [length + 1 for length in self.lengths]

    def _run_dummy_pass(self) -> None:
        """Run a dummy pass: gathering the weights needs all ranks."""
        self.step.model(input_ids=self.batch.prompt_ids[:1, -1:], use_cache=False)

    def _finished_slots(self) -> list[int]:
        """Slots of sequences that have ended, also through `on_tokens`; synchronizes once with the device."""
        state = self.step.state
        num_rows = len(self.lengths)
        if not self.on_tokens:
            is_live = state.is_live[:num_rows].tolist()
            return [slot for slot in range(num_rows) if not is_live[slot]]
        seen = torch.stack((state.is_live.long(), state.num_sampled, state.last_ids), 1)[:num_rows].tolist()
        finished = []
        for slot, (is_live, count, token) in enumerate(seen):
            sample = self.schedule.slots[slot]
            is_new = count > self.num_streamed.get(sample, 0)
            self.num_streamed[sample] = count
            if (is_new and self.on_tokens(sample, [token])) or not is_live:
                finished.append(slot)
        return finished

    def _retire(self, finished: list[int]) -> None:
        """Collect the responses of ended sequences from their slots, and close the gaps."""
        num_rows = len(self.lengths)
        state = self.step.state
        ended = [self.schedule.slots[slot] for slot in finished]
        moves = self.schedule.retire(finished)
        samples, slots, sources, targets = self._to_device(ended, finished, *_columns(moves))
        self._collect(ended, samples, slots)
        if moves:
            self.step.cache.copy_slots(sources, targets, max(self.lengths[source] for source, _ in moves))
            for tensor in state.tensors():
                tensor[targets] = tensor[sources]
            for source, target in moves:
                self.lengths[target] = self.lengths[source]
        num_left = num_rows - len(finished)
        state.is_live[num_left:num_rows] = False  # a pass may be rounded up to include empty slots
        del self.lengths[num_left:]

    def _collect(self, ended: list[int], samples: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the responses of the samples `ended`, which is on the device in `samples`."""
        for result, tensor in zip(self.results.tensors(), self.step.state.tensors(), strict=True):
            result[samples] = tensor[slots]


def _columns(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def continue_turns(state: DecodeState, samples: dict[int, int], on_turns: TurnCallback) -> set[int]:
    """Append the environment's replies to sequences whose turn ended with the stop token; return the slots
    that continue.

    `samples`: the samples by slot. A sequence without room for its reply and one more token ends as
    truncated.
    """
    seen = torch.stack((state.is_stopped.long(), state.num_sampled, state.limits), 1)[list(samples)].tolist()
    # slot: (tokens, limit)
    ended = {s: outcome[1:] for s, outcome in zip(samples, seen, strict=True) if outcome[0]}
    if not ended:
        return set()
    responses = state.response_ids[list(ended)].tolist()
    counts = [count for count, _ in ended.values()]
    replies = on_turns(
        [(samples[s], ids[:count]) for s, ids, count in zip(ended, responses, counts, strict=True)]
    )
    continued = set()
    for (slot, (count, limit)), reply in zip(ended.items(), replies, strict=True):
        if reply is not None and count + len(reply) < limit:
            state.continue_with(slot, count, reply)
            continued.add(slot)
        elif reply is not None:
            state.is_stopped[slot] = False
    return continued


def collect_responses(state: DecodeState, options: SamplingOptions) -> Generation:
    """Responses of sequences that have all ended, one per slot."""
    width = int(state.num_sampled.max())
    mask = torch.arange(width, device=state.num_sampled.device) < state.num_sampled.unsqueeze(1)
    logprobs = state.logprobs[:, :width]
    log_kept = state.log_kept[:, :width]
    return Generation(
        response_ids=torch.where(mask, state.response_ids[:, :width], options.pad_token_id),
        response_mask=mask,
        logprobs=torch.where(mask, logprobs, 0.0),
        truncated_logprobs=torch.where(mask, logprobs - log_kept, 0.0),
        is_finished=state.is_stopped,
        sampled_mask=mask & (state.given_ids[:, :width] < 0),
    )
