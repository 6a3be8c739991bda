"""Global batches do not depend on ranks or accumulation; an evaluation reads each row once."""

import pytest

from common.data.global_batches import BatchStream, GlobalBatches, evaluation_batches

ROWS = list(range(50))


def global_rows(rows: int, accumulation: int, world_size: int, **more) -> list[list[int]]:
    """The rows of each step of an epoch, over all ranks and micro-batches, in their global order."""
    steps: list[list[list[int]]] = []
    for rank in range(world_size):
        batches = GlobalBatches(
            ROWS, list, rows_per_micro_batch=rows, accumulation=accumulation,
            rank=rank, world_size=world_size, seed=3, **more,
        )  # fmt: skip
        for step, micro_batches in enumerate(batches.epoch(1)):
            if rank == 0:
                steps.append([[]] * (accumulation * world_size))
            for index, micro_batch in enumerate(micro_batches):
                assert len(micro_batch) == rows
                steps[step][index * world_size + rank] = micro_batch
    return [[row for part in parts for row in part] for parts in steps]


@pytest.mark.parametrize(("rows", "accumulation", "world_size"), [(4, 2, 1), (4, 1, 2), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize("lengths", [None, [(7 * i) % 23 for i in ROWS]])
def test_a_step_has_the_same_rows_however_they_are_dealt(rows, accumulation, world_size, lengths):
    expected = global_rows(8, 1, 1, group_lengths=lengths)
    assert global_rows(rows, accumulation, world_size, group_lengths=lengths) == expected
    assert len(expected) == 6 and len({row for step in expected for row in step}) == 48


def test_epochs_differ_and_an_epoch_can_begin_in_its_middle():
    batches = GlobalBatches(ROWS, list, rows_per_micro_batch=8, seed=3)
    first, second = list(batches.epoch(0)), list(batches.epoch(1))
    assert first != second
    assert list(batches.epoch(0, first_step=4)) == first[4:]
    endless = batches.forever()
    assert [next(endless) for _ in range(12)] == first + second


@pytest.mark.parametrize("num_drawn", [0, 1, 5, 6, 11])
def test_a_stream_goes_on_behind_what_was_drawn(num_drawn):
    batches = GlobalBatches(ROWS, list, rows_per_micro_batch=8, seed=3)
    drawn = list(batches.epoch(0)) + list(batches.epoch(1))
    stream = BatchStream(batches)
    stream.skip_to(num_drawn)
    assert next(stream) == next(batches.forever(num_drawn)) == drawn[num_drawn]
    assert stream.num_drawn == num_drawn + 1


def test_grouping_by_length_brings_like_rows_together_in_mixed_order():
    lengths = [(7 * i) % 23 for i in ROWS]
    plain = global_rows(8, 1, 1)
    grouped = global_rows(8, 1, 1, group_lengths=lengths)

    def padding(steps):
        return sum(max(lengths[r] for r in step) - lengths[r] for step in steps for r in step)

    assert padding(grouped) < 0.5 * padding(plain)
    means = [sum(lengths[r] for r in step) for step in grouped]
    assert means != sorted(means), "batches must not come from short to long"


def test_too_few_rows_for_one_batch_is_an_error_with_the_arithmetic():
    told = "50 rows, fewer than one global batch of 64 = 16 rows x 2 .* x 2 ranks"
    with pytest.raises(ValueError, match=told):
        GlobalBatches(ROWS, list, rows_per_micro_batch=16, accumulation=2, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_evaluation_counts_each_row_once_with_as_many_batches_on_every_rank(world_size):
    seen, num_batches = [], set()
    for rank in range(world_size):
        batches = list(evaluation_batches(ROWS, list, rows_per_batch=4, rank=rank, world_size=world_size))
        num_batches.add(len(batches))
        seen += [row for rows, real in batches for row, is_real in zip(rows, real, strict=True) if is_real]
    assert sorted(seen) == ROWS and len(num_batches) == 1
    few = list(evaluation_batches(ROWS, list, rows_per_batch=4, max_batches=2))
    assert [rows for rows, _ in few] == [[0, 1, 2, 3], [4, 5, 6, 7]]
