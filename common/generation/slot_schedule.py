"""PURE: which sample sits in which slot of a decoder. Plain Python, no tensors.

Live sequences fill the slots 0 .. n - 1 without gaps: when one leaves, the last takes its place. Samples wait
in the order of their prompts' lengths, so that prompts which are read together need little padding.
"""

from collections import deque
from dataclasses import dataclass, field

# A pass over a few tokens costs about what so many tokens more would: padding up to it is cheaper than
# another pass.
_PADDING_WORTH_A_PASS = 32
# Waiting for more free slots makes fewer and larger passes over new prompts; an empty slot costs little.
_SLOTS_FREE_BEFORE_REFILL = 8


@dataclass
class Admission:
    """Samples that enter the slots `first_slot` .. together."""

    first_slot: int
    samples: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # to be read in one pass, longest first
    prompt_slots: list[int] = field(default_factory=list)  # where their keys and values go
    copies: list[tuple[int, int]] = field(default_factory=list)  # (slot with the same prompt, slot)


class SlotSchedule:
    """Samples of prompts, `num_samples` of each: sample i continues prompt i // num_samples."""

    def __init__(
        self, prompt_lengths: list[int], *, num_samples: int, num_slots: int, max_tokens_per_pass: int
    ) -> None:
        self.prompt_lengths, self.num_samples = prompt_lengths, num_samples
        self.num_slots, self.max_tokens_per_pass = num_slots, max_tokens_per_pass
        order = sorted(range(len(prompt_lengths)), key=lambda prompt: -prompt_lengths[prompt])
        self.waiting = deque(p * num_samples + k for p in order for k in range(num_samples))
        self.slots: list[int] = []  # the sample of each live slot

    def prompt_of(self, sample: int) -> int:
        """Return the prompt that a sample continues."""
        return sample // self.num_samples

    def has_work(self) -> bool:
        """Whether a sample waits or runs."""
        return bool(self.waiting or self.slots)

    def should_admit(self) -> bool:
        """Whether it is time to read new prompts, rather than to add a token to the live ones."""
        num_free = self.num_slots - len(self.slots)
        if not self.waiting or not num_free:
            return False
        worthwhile = max(self.num_slots // _SLOTS_FREE_BEFORE_REFILL, 1)
        return not self.slots or num_free >= min(worthwhile, len(self.waiting))

    def has_waiting_sibling(self, prompt: int) -> bool:
        """Whether more samples of a prompt wait; they stand at the head of the queue."""
        return bool(self.waiting) and self.prompt_of(self.waiting[0]) == prompt

    def admit(self) -> Admission:
        """Take what fits into the free slots and into one pass; at least one sample must wait."""
        admission = Admission(len(self.slots))
        slot_with = {self.prompt_of(sample): slot for slot, sample in enumerate(self.slots)}
        padding, width = 0, 0
        while self.waiting and len(self.slots) < self.num_slots:
            sample = self.waiting[0]
            prompt, slot = self.prompt_of(sample), len(self.slots)
            if prompt in slot_with:
                admission.copies.append((slot_with[prompt], slot))
            else:
                width = width or self.prompt_lengths[prompt]
                padding += width - self.prompt_lengths[prompt]
                num_tokens = width * (len(admission.prompts) + 1)
                is_full = num_tokens > self.max_tokens_per_pass or padding > _PADDING_WORTH_A_PASS
                if admission.prompts and is_full:
                    break
                admission.prompts.append(prompt)
                admission.prompt_slots.append(slot)
                slot_with[prompt] = slot
            self.slots.append(self.waiting.popleft())
            admission.samples.append(sample)
        return admission

    def retire(self, finished: list[int]) -> list[tuple[int, int]]:
        """Empty these slots; return (from, to) of the sequences that must move to close the gaps."""
        num_left = len(self.slots) - len(finished)
        gone = set(finished)
        holes = [slot for slot in finished if slot < num_left]
        movers = [slot for slot in range(num_left, len(self.slots)) if slot not in gone]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.slots[target] = self.slots[source]
        del self.slots[num_left:]
        return moves
