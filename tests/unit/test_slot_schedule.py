"""Which sample sits in which slot: nobody is lost, prompts are read once, little padding."""

import random

import pytest

from common.generation.generate import SlotSchedule


def simulate(lengths, *, num_samples, num_slots, seed=0, max_tokens_per_pass=4096):
    """Run a schedule to its end with random endings; return (admissions, every slot's history)."""
    draw = random.Random(seed)
    schedule = SlotSchedule(
        lengths, num_samples=num_samples, num_slots=num_slots, max_tokens_per_pass=max_tokens_per_pass
    )
    admissions, ended = [], []
    while schedule.has_work():
        if schedule.should_admit():
            before = len(schedule.slots)
            admission = schedule.admit()
            admissions.append(admission)
            assert admission.first_slot == before
            assert schedule.slots[before:] == admission.samples and admission.samples
            assert len(schedule.slots) <= num_slots
        finished = [slot for slot in range(len(schedule.slots)) if draw.random() < 0.2]
        old = list(schedule.slots)
        ended += [old[slot] for slot in finished]
        moves = schedule.retire(finished)
        left = [sample for slot, sample in enumerate(old) if slot not in finished]
        assert sorted(schedule.slots) == sorted(left)
        for source, target in moves:
            assert schedule.slots[target] == old[source] and target in finished and source not in finished
        moved = {target for _, target in moves}
        assert all(schedule.slots[s] == old[s] for s in range(len(left)) if s not in moved)
    return admissions, ended


@pytest.mark.parametrize("num_slots", [1, 2, 5, 64])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_every_sample_runs_once(num_slots, num_samples):
    draw = random.Random(4)
    lengths = [draw.randint(1, 60) for _ in range(23)]
    for seed in range(5):
        _, ended = simulate(lengths, num_samples=num_samples, num_slots=num_slots, seed=seed)
        assert sorted(ended) == list(range(23 * num_samples))


def test_samples_of_a_prompt_share_one_pass_where_they_fit():
    admissions, _ = simulate([5, 9, 7], num_samples=4, num_slots=12)
    assert [a.prompts for a in admissions] == [[1, 2, 0]]
    assert admissions[0].samples == [4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3]
    assert admissions[0].prompt_slots == [0, 4, 8]
    assert admissions[0].copies == [(0, 1), (0, 2), (0, 3), (4, 5), (4, 6), (4, 7), (8, 9), (8, 10), (8, 11)]


def test_a_late_sample_copies_from_a_sibling_that_still_runs():
    schedule = SlotSchedule([6], num_samples=3, num_slots=2, max_tokens_per_pass=64)
    assert schedule.admit().prompts == [0]
    assert schedule.has_waiting_sibling(0) and not schedule.should_admit()
    schedule.retire([0])
    assert schedule.slots == [1] and schedule.should_admit()
    late = schedule.admit()
    assert late.prompts == [] and late.copies == [(0, 1)] and late.samples == [2]
    assert not schedule.has_waiting_sibling(0)


def test_prompts_are_read_with_those_of_like_length_within_the_cap():
    admissions, _ = simulate([50, 3, 48, 4, 49, 2], num_samples=1, num_slots=6)
    assert [a.prompts for a in admissions] == [[0, 4, 2], [3, 1, 5]]
    admissions, _ = simulate([10] * 5, num_samples=1, num_slots=5, max_tokens_per_pass=25)
    assert [len(a.prompts) for a in admissions] == [2, 2, 1]
    admissions, _ = simulate([100], num_samples=1, num_slots=5, max_tokens_per_pass=25)
    assert [len(a.prompts) for a in admissions] == [1], "one prompt is always read"


def test_a_slot_is_refilled_without_waiting_for_the_batch():
    schedule = SlotSchedule([4] * 40, num_samples=1, num_slots=16, max_tokens_per_pass=4096)
    schedule.admit()
    schedule.retire([3])
    assert not schedule.should_admit(), "one free slot of sixteen is not worth a pass"
    schedule.retire([0])
    assert schedule.should_admit()
