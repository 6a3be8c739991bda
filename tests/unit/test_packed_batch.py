"""Batches end to end against the same done with nested lists, small ones by hand; rows to batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data import packed_batch
from common.data.collators import collate_pairs, collate_prompts, collate_sft, collate_texts, prompt_texts
from common.data.packed_batch import (
    PackedBatch,
    pack_rows,
    pad_rows,
    pad_sequences,
    padded_slots,
    score_by_length,
    sum_by_sequence,
    token_positions,
)

few_examples = settings(max_examples=30, deadline=None)
TRAILING = {"tokens": (), "values": (3,), "flags": ()}
DTYPES = {"tokens": torch.int64, "values": torch.float32, "flags": torch.bool}


def nested(batch):
    """{id: {key: its sequence as a list}}, read one after another; checks the batch on the way."""
    batch.check()
    result = {item_id: {} for item_id in batch.ids}
    for key, data in batch.data.items():
        start = 0
        for item_id, length in zip(batch.ids, batch.lengths[key].tolist(), strict=True):
            result[item_id][key] = data[start : start + length].tolist()
            start += length
    return result


def draw_sequence(draw, key):
    shape = (draw(st.integers(0, 4)), *TRAILING[key])
    first = draw(st.integers(0, 1000))
    values = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
    return (values % 3 == 0) if key == "flags" else values.to(DTYPES[key])


@st.composite
def drawn_sequences(draw):
    """(ids, sequences[key][item]), some of length 0."""
    num_items = draw(st.integers(1, 5))
    sequences = {key: [draw_sequence(draw, key) for _ in range(num_items)] for key in TRAILING}
    return tuple(f"item {i}" for i in range(num_items)), sequences


batches = drawn_sequences().map(lambda drawn: PackedBatch.build(*drawn))


def example():
    return PackedBatch.build(
        ("a", "b"),
        {
            "prompt": [torch.tensor([1, 2, 3]), torch.tensor([4])],
            "response": [torch.tensor([5, 6]), torch.tensor([8, 9, 10])],
        },
    )


@few_examples
@given(drawn_sequences())
def test_packed_batch_build_round_trips(drawn):
    ids, sequences = drawn
    batch = PackedBatch.build(ids, sequences)
    expected = {item: {k: of[i].tolist() for k, of in sequences.items()} for i, item in enumerate(ids)}
    assert nested(batch) == expected and len(batch) == len(ids)
    assert {key: data.dtype for key, data in batch.data.items()} == DTYPES
    assert all(map(torch.equal, batch.sequences("values"), sequences["values"]))


@few_examples
@given(batches, st.data())
def test_packed_batch_select_and_concat_keep_the_given_order(batch, data):
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    parts = [batch.select(order[:cut]), batch.select(torch.tensor(order[cut:]))]
    whole = nested(batch)
    assert parts[0].ids == tuple(batch.ids[i] for i in order[:cut])
    assert nested(parts[0]) == {item_id: whole[item_id] for item_id in parts[0].ids}
    again = PackedBatch.concat(parts)
    assert nested(again) == whole and again.select(torch.tensor(order).argsort()).ids == batch.ids


def test_packed_batch_to_moves_the_data_alone():
    """On the device `meta` an operation that needs a value of the data, and so a wait for a GPU, fails."""
    moved = example().to("meta")
    for part in (moved, moved.select([1, 0])):
        part.check()
        assert {tensor.device.type for tensor in part.data.values()} == {"meta"}
        assert {tensor.device.type for tensor in part.lengths.values()} == {"cpu"}
    assert moved.pad("prompt")[0].device.type == moved.pad("prompt")[1].device.type == "meta"
    assert moved.interleave("prompt", "response")[0].device.type == "meta"


def test_packed_batch_layout_by_hand():
    batch = example()
    assert batch.data["response"].tolist() == [5, 6, 8, 9, 10]
    assert batch.lengths["response"].tolist() == [2, 3]
    assert token_positions(batch.lengths["prompt"]).tolist() == [0, 1, 2, 0]
    assert token_positions(batch.lengths["prompt"], torch.tensor([7, 1])).tolist() == [7, 8, 9, 1]
    assert padded_slots(batch.lengths["prompt"]).tolist() == [0, 1, 2, 3]
    assert padded_slots(batch.lengths["prompt"], on_left=True).tolist() == [0, 1, 2, 5]


def test_pad_rows_by_hand():
    ids, mask = pad_rows([[1, 2, 3], [4], []], -1)
    assert ids.tolist() == [[1, 2, 3], [4, -1, -1], [-1, -1, -1]] and ids.dtype == torch.int64
    assert mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    ids, mask = pad_rows([[1, 2, 3], [4]], -1, on_left=True)
    assert ids.tolist() == [[1, 2, 3], [-1, -1, 4]] and mask.tolist() == [[True] * 3, [False, False, True]]


def test_pad_sequences_by_hand():
    data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    rows, mask = pad_sequences(data, torch.tensor([1, 2]))
    assert rows.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]
    assert mask.dtype == torch.bool and mask.tolist() == [[True, False], [True, True]]
    assert pack_rows([[], []])[0].dtype == torch.int64 and pack_rows([])[1].dtype == torch.int64
    empty, mask = pad_sequences(data[:0], torch.tensor([], dtype=torch.int64))
    assert empty.shape == (0, 0, 2) and mask.shape == (0, 0)


def test_sum_by_sequence_by_hand():
    mask = torch.tensor([True, False, True, True, False, True])
    sums = sum_by_sequence(torch.tensor([1.0, 2.0, 4.0, 8.0]), mask, torch.tensor([3, 0, 2, 1]))
    assert sums.tolist() == [3, 0, 4, 8]


def test_packed_batch_interleave_puts_responses_behind_prompts():
    token_ids, lengths = example().interleave("prompt", "response")
    assert token_ids.tolist() == [1, 2, 3, 5, 6, 4, 8, 9, 10]
    assert lengths.tolist() == [[3, 2], [1, 3]]


def test_packed_batch_adds_keys_numbers_and_texts():
    batch = example().with_numbers("reward", torch.tensor([3.0, 4.0]))
    assert batch.numbers("reward").tolist() == [3, 4]
    batch = batch.with_key("response", batch.data["response"] * 2, like="response")
    batch = batch.with_key("more", torch.arange(3), lengths=torch.tensor([0, 3]))
    assert nested(batch)["a"] == {"prompt": [1, 2, 3], "response": [10, 12], "reward": [3], "more": []}
    assert example().data["response"].tolist() == [5, 6, 8, 9, 10]
    assert batch.with_texts("name", ["ä", ""]).texts("name") == ["ä", ""]
    assert batch.with_texts("name", ["\ud800", "b"]).texts("name") == ["?", "b"]  # half of a surrogate pair
    assert batch.with_texts("name", ["", ""]).data["name"].dtype == torch.uint8
    assert example().pad("response")[0].tolist() == [[5, 6, 0], [8, 9, 10]]
    assert nested(PackedBatch.concat([example()])) == nested(example())


def test_packed_batch_of_no_items():
    empty = example().select([])
    assert len(empty) == 0 and nested(empty) == {} and empty.sequences("response") == []
    assert empty.pad("response")[0].shape == (0, 0)
    assert nested(PackedBatch.concat([empty, example()])) == nested(example())


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: PackedBatch.build("ab", {"x": [ONE]}),
            "key 'x': lengths are (torch.int64, 'cpu', torch.Size([1]))",
        ),
        (
            lambda: PackedBatch.build("ab", {"x": [ONE, ONE.long()]}),
            "key 'x': sequences must be of one kind",
        ),
        (
            lambda: PackedBatch.build("ab", {"x": [torch.ones(1, 1), torch.ones(1, 2)]}),
            "key 'x': sequences must be of one kind",
        ),
        (lambda: example().select([0, 0]), "an id occurs twice"),
        (lambda: example().pad("z"), "key 'z' is not among ['prompt', 'response']"),
        (lambda: example().numbers("prompt"), "key 'prompt': lengths [3, 1], not 1"),
        (lambda: example().with_numbers("n", torch.ones(3)), "key 'n': lengths [1, 1], data (3,)"),
    ],
)
def test_packed_batch_errors_name_the_key(call, message):
    with pytest.raises(AssertionError) as error:
        call()
    assert message in str(error.value)


# ---- collators

EOS = 9


def test_collate_sft_by_hand():
    rows = [
        {"input_ids": [1, 2, EOS], "loss_mask": [False, True, True], "row_id": "a"},
        {"input_ids": [1, EOS], "loss_mask": [True, True], "row_id": "a"},
    ]
    batch = collate_sft(rows)
    assert batch.ids == ((0, "a"), (1, "a"))
    assert batch.data["input_ids"].tolist() == [1, 2, EOS, 1, EOS]
    assert batch.lengths["input_ids"].tolist() == [3, 2]
    assert batch.data["loss_mask"].tolist() == [False, True, True, False, True]
    assert batch.data["loss_mask"].dtype == torch.bool and rows[1]["loss_mask"] == [True, True]


def test_collate_texts_trains_all_but_the_first_token():
    batch = collate_texts([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])
    assert batch.data["loss_mask"].tolist() == [False, True, True] * 2


def test_collate_pairs_by_hand():
    starts = {"chosen_response_start": 1, "rejected_response_start": 0}
    rows = [
        starts | {"chosen_ids": [1, 2, EOS], "rejected_ids": [1, 3], "margin": 0.5, "row_id": "a"},
        starts | {"chosen_ids": [4, 5], "rejected_ids": [4, 6, 7, EOS], "margin": 0.0, "row_id": "b"},
    ]
    batch = collate_pairs(rows)
    token_ids, lengths = batch.interleave("chosen_ids", "rejected_ids")
    assert token_ids.tolist() == [1, 2, EOS, 1, 3, 4, 5, 4, 6, 7, EOS]
    assert lengths.tolist() == [[3, 2], [2, 4]] and len(batch) == 2
    assert batch.numbers("chosen_response_start").tolist() == [1, 1]
    assert batch.numbers("rejected_response_start").tolist() == [0, 0]
    assert batch.numbers("margin").tolist() == [0.5, 0.0] and batch.data["margin"].dtype == torch.float32
    rows = [row | {"reference_logprobs": torch.tensor([-1.0, -2.0])} for row in rows]
    assert collate_pairs(rows).data["reference_logprobs"].tolist() == [-1, -2, -1, -2]


def test_collate_prompts_keeps_texts():
    rows = [
        {"prompt_ids": [1, 2, 3], "row_id": "a", "prompt_text": "äbc", "fields": '{"answer": "4"}'},
        {"prompt_ids": [EOS], "row_id": "b", "prompt_text": "d", "fields": "{}"},
    ]
    batch = collate_prompts([row | {"messages": "[]"} for row in rows])
    assert batch.data["prompt_ids"].tolist() == [1, 2, 3, EOS] and batch.texts("row_ids") == ["a", "b"]
    assert prompt_texts(batch) == [("äbc", {"answer": "4"}), ("d", {})]


def test_repr_has_shapes_and_no_numbers():
    batch = PackedBatch.build(("a", "b"), {"ids": [torch.arange(3), torch.arange(400)]})
    assert repr(batch) == "PackedBatch of 2: ids (403,) int64"


@pytest.mark.parametrize(
    ("lengths", "batch_size", "sizes"),
    [
        ([3, 1, 2], 2, [[1, 2], [3]]),
        ([4, 4, 4], 64, [[4, 4], [4]]),  # at most 10 tokens
        ([1, 1, 1, 9, 2], 64, [[1, 1, 1, 2], [9]]),  # 4 x 2, but not 5 x 9
        ([11, 30], 64, [[11], [30]]),  # longer than that
        ([0, 0], 2, [[0, 0]]),
        ([], 2, []),
    ],
)
def test_rows_are_scored_in_batches_that_are_not_too_large(lengths, batch_size, sizes, monkeypatch):
    def score(batch: list[list[int]]) -> list[float]:
        seen.append([len(row) for row in batch])
        return [float(row[0]) if row else -1.0 for row in batch]

    monkeypatch.setattr(packed_batch, "PADDED_TOKENS", 10)
    rows = [[number] * length for number, length in enumerate(lengths)]
    seen: list[list[int]] = []
    assert score_by_length(rows, batch_size, score) == [float(row[0]) if row else -1.0 for row in rows]
    assert seen == sizes
