"""Batches end to end against the same done with nested lists, and small ones by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.packed_batch import PackedBatch

few_examples = settings(max_examples=30, deadline=None)
TRAILING = {"tokens": (), "values": (3,), "flags": ()}
DTYPES = {"tokens": torch.int64, "values": torch.float32, "flags": torch.bool}


def nested(batch):
    """{id: {key: its sequences as lists}}, read one sequence after another; checks the batch on the way."""
    batch.check()
    result = {item_id: {key: [] for key in batch.data} for item_id in batch.ids}
    for key, data in batch.data.items():
        start = 0
        for length, item in zip(batch.lengths[key].tolist(), batch.group_ids[key].tolist(), strict=True):
            result[batch.ids[item]][key].append(data[start : start + length].tolist())
            start += length
    return result


def draw_sequence(draw, key, length):
    shape = (length, *TRAILING[key])
    first = draw(st.integers(0, 1000))
    values = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
    return (values % 3 == 0) if key == "flags" else values.to(DTYPES[key])


@st.composite
def nested_sequences(draw, min_items=1, keys=tuple(TRAILING), counts=(0, 3)):
    """(ids, sequences[key][item] = list of tensors), some of length 0, some items without one."""
    num_items = draw(st.integers(min_items, 5))
    sequences = {}
    for key in keys:
        num_sequences = [draw(st.integers(*counts)) for _ in range(num_items)]
        num_sequences[draw(st.integers(0, num_items - 1))] += not any(num_sequences)
        sequences[key] = [
            [draw_sequence(draw, key, draw(st.integers(0, 4))) for _ in range(count)]
            for count in num_sequences
        ]
    return tuple(f"item {i}" for i in range(num_items)), sequences


batches = nested_sequences().map(lambda drawn: PackedBatch.build(*drawn))
one_each = nested_sequences(counts=(1, 1)).map(lambda drawn: PackedBatch.build(*drawn))


def example():
    """Two prompts, with two responses and one; a score for each response."""
    return PackedBatch.build(
        ("a", "b"),
        {
            "prompt": [[torch.tensor([1, 2, 3])], [torch.tensor([4])]],
            "response": [[torch.tensor([5, 6]), torch.tensor([7])], [torch.tensor([8, 9, 10])]],
            "score": [[torch.tensor([0.5]), torch.tensor([1.5])], [torch.tensor([2.5])]],
        },
    )


# Round trips


@few_examples
@given(nested_sequences())
def test_build_holds_what_it_was_given(drawn):
    ids, sequences = drawn
    batch = PackedBatch.build(ids, sequences)
    expected = {
        item_id: {key: [tensor.tolist() for tensor in of_items[i]] for key, of_items in sequences.items()}
        for i, item_id in enumerate(ids)
    }
    assert nested(batch) == expected and len(batch) == len(ids)
    for key, of_items in sequences.items():
        assert batch.data[key].dtype == DTYPES[key]
        flat = [tensor for of_item in of_items for tensor in of_item]
        views = batch.sequences(key)
        assert len(views) == len(flat)
        assert all(torch.equal(view, tensor) for view, tensor in zip(views, flat, strict=True))


@few_examples
@given(batches, st.booleans(), st.integers(0, 1))
def test_pad_puts_each_sequence_to_its_side(batch, on_left, pad_value):
    for key in batch.data:
        padded, mask = batch.pad(key, pad_value=pad_value, on_left=on_left)
        rows = batch.sequences(key)
        width = max(len(row) for row in rows)
        assert padded.shape == (len(rows), width, *TRAILING[key]) and padded.dtype == DTYPES[key]
        assert mask.shape == (len(rows), width) and mask.dtype == torch.bool
        for row, padded_row, mask_row in zip(rows, padded, mask, strict=True):
            num_padding = width - len(row)
            is_token = [True] * len(row)
            padding = [False] * num_padding
            assert mask_row.tolist() == (padding + is_token if on_left else is_token + padding)
            kept = padded_row[num_padding:] if on_left else padded_row[: len(row)]
            assert torch.equal(kept, row)
            assert (padded_row[~mask_row] == pad_value).all()


@few_examples
@given(one_each, st.booleans())
def test_unpad_undoes_pad(batch, on_left):
    columns = {key: batch.pad(key, on_left=on_left, pad_value=1) for key in batch.data}
    assert nested(PackedBatch.unpad(batch.ids, columns)) == nested(batch)


@few_examples
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_unpad_takes_what_any_mask_selects(rows):
    mask = torch.tensor(rows)
    padded = torch.arange(mask.numel() * 2).view(*mask.shape, 2)
    batch = PackedBatch.unpad(range(len(rows)), {"x": (padded, mask)})
    expected = {i: {"x": [padded[i][mask[i]].tolist()]} for i in range(len(rows))}
    assert nested(batch) == expected


@few_examples
@given(batches, st.data())
def test_gather_undoes_split(batch, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    parts = batch.split(counts)
    assert [len(part) for part in parts] == counts
    whole, first = nested(batch), 0
    for part, count in zip(parts, counts, strict=True):
        assert part.ids == batch.ids[first : first + count]
        assert nested(part) == {item_id: whole[item_id] for item_id in part.ids}
        first += count
    again = PackedBatch.concat(parts)
    assert again.ids == batch.ids and nested(again) == whole


@few_examples
@given(batches, st.data())
def test_select_takes_items_in_the_order_asked_for(batch, data):
    order = data.draw(st.permutations(range(len(batch))))
    chosen = order[: data.draw(st.integers(0, len(batch)))]
    some = batch.select(torch.tensor(chosen) if chosen else chosen)
    whole = nested(batch)
    assert some.ids == tuple(batch.ids[i] for i in chosen)
    assert nested(some) == {item_id: whole[item_id] for item_id in some.ids}
    back = batch.select(order).select(torch.tensor(order).argsort())
    assert back.ids == batch.ids and nested(back) == whole


@few_examples
@given(nested_sequences(keys=("tokens",)), nested_sequences(min_items=5, keys=("values",), counts=(1, 1)))
def test_ungroup_makes_an_item_of_each_sequence(drawn, drawn_once):
    ids, sequences = drawn
    once = drawn_once[1]["values"][: len(ids)]
    batch = PackedBatch.build(ids, {**sequences, "values": once})
    batch = batch.with_key("shifted", batch.data["tokens"] + 1, like="tokens")
    expected = {}
    for i, item_id in enumerate(ids):
        for k, tensor in enumerate(sequences["tokens"][i]):
            shifted = (tensor + 1).tolist()
            values = once[i][0].tolist()
            expected[item_id, k] = {"tokens": [tensor.tolist()], "values": [values], "shifted": [shifted]}
    alone = batch.ungroup("tokens")
    assert alone.ids == tuple(expected) and nested(alone) == expected


@few_examples
@given(batches)
def test_only_the_data_move_to_another_device(batch):
    """On the device `meta` an operation that needs a value of the data, and so a wait for a GPU, fails."""
    moved = batch.to("meta")
    assert nested(batch.to("cpu")) == nested(batch)
    moved.check()
    for part in (moved, moved.select(range(len(batch))[::-1]), moved.split([1, len(batch) - 1])[0]):
        assert {tensor.device.type for tensor in part.data.values()} == {"meta"}
        fields = (*part.lengths.values(), *part.group_ids.values())
        assert {tensor.device.type for tensor in fields} == {"cpu"}
    for key in batch.data:
        padded, mask = moved.pad(key)
        assert padded.shape == batch.pad(key)[0].shape
        assert {padded.device.type, mask.device.type, moved.cu_seqlens(key).device.type} == {"meta"}


# By hand


def test_the_layout():
    batch = example()
    assert batch.data["response"].tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.lengths["response"].tolist() == [2, 1, 3]
    assert batch.group_ids["response"].tolist() == [0, 0, 1]
    assert batch.cu_seqlens("response").tolist() == [0, 2, 3, 6]
    assert batch.cu_seqlens("response").dtype == torch.int32


def test_pad_by_hand():
    padded, mask = example().pad("response", pad_value=-1)
    assert padded.tolist() == [[5, 6, -1], [7, -1, -1], [8, 9, 10]]
    assert mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    padded, mask = example().pad("response", pad_value=-1, on_left=True)
    assert padded.tolist() == [[-1, 5, 6], [-1, -1, 7], [8, 9, 10]]
    assert mask.tolist() == [[False, True, True], [False, False, True], [True, True, True]]


def test_select_by_hand():
    batch = example().select([1, 0])
    assert batch.ids == ("b", "a")
    assert batch.data["response"].tolist() == [8, 9, 10, 5, 6, 7]
    assert batch.lengths["response"].tolist() == [3, 2, 1]
    assert batch.group_ids["response"].tolist() == [0, 1, 1]


def test_ungroup_by_hand():
    batch = example().ungroup("response")
    assert batch.ids == (("a", 0), ("a", 1), ("b", 0))
    assert batch.data["prompt"].tolist() == [1, 2, 3, 1, 2, 3, 4]
    assert batch.numbers("score").tolist() == [0.5, 1.5, 2.5]


def test_an_item_without_a_sequence_is_gone_when_ungrouped():
    one = torch.ones(1)
    batch = PackedBatch.build("ab", {"x": [[], [one, one]], "y": [[one], [2 * one]]}).ungroup("x")
    assert batch.ids == (("b", 0), ("b", 1)) and batch.numbers("y").tolist() == [2, 2]


def test_single_and_gather():
    a = PackedBatch.single("a", id=torch.tensor([1, 2]), x=[torch.tensor([3]), torch.tensor([4, 5])])
    b = PackedBatch.single("b", x=[torch.tensor([6])], id=torch.tensor([7]))
    batch = PackedBatch.concat([a, b])
    assert nested(batch) == {"a": {"id": [[1, 2]], "x": [[3], [4, 5]]}, "b": {"id": [[7]], "x": [[6]]}}


def test_from_lengths():
    batch = PackedBatch.from_lengths(
        "ab", {"x": torch.arange(3), "y": torch.ones(2)}, {"x": [0, 3], "y": [1, 1]}
    )
    assert nested(batch) == {"a": {"x": [[]], "y": [[1]]}, "b": {"x": [[0, 1, 2]], "y": [[1]]}}


def test_keys_come_and_go():
    batch = example().with_numbers("reward", torch.tensor([3.0, 4.0]))
    assert batch.numbers("reward").tolist() == [3, 4]
    batch = batch.with_key("response", batch.data["response"] * 2, like="response")
    assert nested(batch)["a"]["response"] == [[10, 12], [14]]
    assert set(batch.without("reward", "score").data) == {"prompt", "response"}
    assert example().data["response"].tolist() == [5, 6, 7, 8, 9, 10]


def test_a_batch_of_no_items():
    empty = example().split([0, 2])[0]
    assert len(empty) == 0 and nested(empty) == {}
    padded, mask = empty.pad("response")
    assert padded.shape == mask.shape == (0, 0)
    assert empty.cu_seqlens("response").tolist() == [0] and empty.sequences("response") == []
    assert nested(PackedBatch.concat([empty, example()])) == nested(example())
    assert len(empty.select([])) == len(empty.ungroup("response")) == 0


def test_gradients_flow_through_pad_select_and_ungroup():
    values = torch.arange(4.0, requires_grad=True)
    batch = PackedBatch.from_lengths("ab", {"x": values}, {"x": [1, 3]})
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 50.0, 60.0]])
    (batch.select([1, 0]).pad("x")[0] * weights).sum().backward()
    assert values.grad.tolist() == [4, 1, 2, 3]


# Errors

ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedBatch.build("ab", {"x": [[ONE]]}), "key 'x': sequences of 1 items for 2 ids"),
        (lambda: PackedBatch.build("a", {"x": [[]]}), "key 'x': no sequence at all"),
        (lambda: PackedBatch.build("a", {"x": [ONE]}), "key 'x': a sequence without a length"),
        (
            lambda: PackedBatch.build("a", {"x": [[ONE, ONE.long()]]}),
            "key 'x': sequences differ: torch.float32",
        ),
        (lambda: PackedBatch.build("a", {"x": [[ONE, ONE[None]]]}), "key 'x': sequences differ"),
        (lambda: PackedBatch.build("aa", {"x": [[ONE], [ONE]]}), "id 'a' comes twice"),
        (lambda: PackedBatch.from_lengths("a", {"x": ONE}, {"x": [2]}), "key 'x': lengths add up to 2"),
        (lambda: PackedBatch.from_lengths("a", {"x": ONE}, {"x": [1, 0]}), "key 'x': lengths (2,) for 1 ids"),
        (
            lambda: PackedBatch.from_lengths("a", {"x": ONE}, {"y": [1]}),
            "keys ['y'] of lengths, ['x'] of data",
        ),
        (lambda: PackedBatch.concat([]), "no batches"),
        (lambda: PackedBatch.concat([example(), example()]), "id 'a' comes twice"),
        (lambda: PackedBatch.concat([example(), PackedBatch.single("c", x=ONE)]), "keys ['x'] of one batch"),
        (
            lambda: PackedBatch.concat(
                [PackedBatch.single(i, x=ONE.to(d)) for i, d in enumerate(DTYPES.values())]
            ),
            "key 'x': sequences differ",
        ),
        (lambda: example().split([1]), "counts [1] must be 0 or more and add up to 2"),
        (lambda: example().split([3, -1]), "counts [3, -1] must"),
        (lambda: example().select([0, 0]), "indexes [0, 0] must not have one twice"),
        (lambda: example().select([2]), "indexes [2] must be from 0 to 1"),
        (lambda: example().select([-1]), "indexes [-1] must be from 0 to 1"),
        (lambda: example().select(torch.tensor([True, False])), "must be integers, not torch.bool"),
        (lambda: example().pad("z"), "key 'z' is not among ['prompt', 'response', 'score']"),
        (lambda: example().without("z"), "key 'z' is not among"),
        (lambda: example().numbers("score"), "key 'score': not one number an item"),
        (lambda: example().numbers("prompt"), "key 'prompt': not one number an item, but lengths [3, 1]"),
        (lambda: example().with_numbers("n", torch.ones(3)), "key 'n': values (3,) for 2 items"),
        (
            lambda: example().with_key("n", ONE, like="prompt"),
            "key 'n': data (1,), but 'prompt' has 4 tokens",
        ),
        (lambda: example().ungroup("prompt"), "key 'response': neither one sequence an item, nor as many as"),
        (
            lambda: PackedBatch.unpad("a", {"x": (torch.ones(1, 2), torch.ones(1, 2).long())}),
            "key 'x': mask must be bool, not torch.int64",
        ),
        (
            lambda: PackedBatch.unpad("aa", {"x": (torch.ones(2, 2), torch.ones(2, 2).bool())}),
            "id 'a' comes twice",
        ),
        (
            lambda: PackedBatch.unpad("a", {"x": (torch.ones(2, 2), torch.ones(2, 2).bool())}),
            "key 'x': tensor (2, 2) and mask (2, 2) for 1 ids",
        ),
    ],
)
def test_errors_name_the_key(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lengths", torch.tensor([3, 0]), "lengths add up to 3, data are (4,)"),
        ("lengths", torch.tensor([5, -1]), "a negative length among [5, -1]"),
        (
            "lengths",
            torch.tensor([3, 1]).int(),
            "lengths must be one row of int64 on the CPU, not torch.int32",
        ),
        ("lengths", torch.tensor([3, 1], device="meta"), "lengths must be one row of int64 on the CPU"),
        ("group_ids", torch.tensor([[0, 1]]), "group_ids must be one row of int64 on the CPU"),
        ("group_ids", torch.tensor([0]), "2 lengths, but 1 group_ids"),
        ("group_ids", torch.tensor([1, 0]), "group_ids [1, 0] decrease"),
        ("group_ids", torch.tensor([0, 2]), "group_ids [0, 2] for 2 ids"),
        ("group_ids", torch.tensor([-1, 0]), "group_ids [-1, 0] for 2 ids"),
        ("data", torch.tensor(4), "lengths add up to 4, data are ()"),
    ],
)
def test_check_names_what_is_wrong(field, value, message):
    batch = example()
    getattr(batch, field)["prompt"] = value
    with pytest.raises(ValueError) as error:
        batch.check()
    assert f"key 'prompt': {message}" in str(error.value)


def test_check_compares_the_keys():
    batch = example()
    del batch.group_ids["score"]
    with pytest.raises(ValueError, match="keys .* of group_ids, .* of data"):
        batch.check()
