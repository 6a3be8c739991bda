"""common/data/collators.py: shapes, masks and lengths, with PAD equal to EOS."""

import torch

from common.data.collators import PairCollator, PromptCollator, SFTCollator, pad_rows

EOS = 9


def test_pad_rows_on_either_side_and_to_a_multiple():
    ids, mask = pad_rows([[1, 2, 3], [4]], 0, pad_to_multiple=4)
    assert ids.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]
    ids, mask = pad_rows([[1, 2, 3], [4]], 0, on_left=True)
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]] and mask.tolist() == [[True] * 3, [False, False, True]]
    assert pad_rows([[1, 2], [3, 4]], 0, pad_to_multiple=2)[0].shape == (2, 2)


def test_sft_batch_counts_the_eos_and_not_the_equal_padding():
    rows = [
        {"input_ids": [1, 2, EOS], "loss_mask": [False, True, True], "row_id": "a"},
        {"input_ids": [1, EOS], "loss_mask": [False, True], "row_id": "b"},
    ]
    batch = SFTCollator(EOS)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, EOS], [1, EOS, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False, True, False]]
    assert batch["loss_mask"].dtype == torch.bool and batch["lengths"].tolist() == [3, 2]
    assert batch["row_ids"] == ["a", "b"]


def test_padding_value_changes_nothing_but_itself():
    rows = [{"input_ids": [1], "loss_mask": [False], "row_id": "a"}] + [
        {"input_ids": [1, 2, 3], "loss_mask": [False, True, True], "row_id": "b"}
    ]
    one, other = SFTCollator(0)(rows), SFTCollator(7)(rows)
    for name in ("attention_mask", "loss_mask", "lengths"):
        assert torch.equal(one[name], other[name])
    counts = one["attention_mask"].bool()
    assert torch.equal(one["input_ids"][counts], other["input_ids"][counts])


def test_pair_batch_has_chosen_then_rejected():
    rows = [
        {
            "chosen_ids": [1, 2, EOS],
            "rejected_ids": [1, 3],
            "chosen_response_start": 1,
            "rejected_response_start": 1,
        }
        | {"margin": 0.5, "row_id": "a"},
        {"chosen_ids": [4, 5], "rejected_ids": [4, 6, 7, EOS], "chosen_response_start": 1}
        | {"rejected_response_start": 1, "margin": 0.0, "row_id": "b"},
    ]
    batch = PairCollator(EOS, pad_to_multiple=8)(rows)
    assert batch["input_ids"].shape == (4, 8)
    assert [row[:2].tolist() for row in batch["input_ids"]] == [[1, 2], [4, 5], [1, 3], [4, 6]]
    assert batch["lengths"].tolist() == [3, 2, 2, 4] and batch["attention_mask"].sum(1).tolist() == [
        3,
        2,
        2,
        4,
    ]
    assert batch["response_starts"].tolist() == [1, 1, 1, 1]
    assert batch["margins"].tolist() == [0.5, 0.0] and batch["margins"].dtype == torch.float32


def test_prompts_end_in_the_last_column():
    rows = [
        {"prompt_ids": [1, 2, 3], "row_id": "a", "prompt_text": "abc", "fields": '{"answer": "4"}'},
        {"prompt_ids": [EOS], "row_id": "b", "prompt_text": "d", "fields": "{}"},
    ]
    batch = PromptCollator(EOS)(rows)
    assert batch["prompt_ids"].tolist() == [[1, 2, 3], [EOS, EOS, EOS]]
    assert batch["prompt_mask"].tolist() == [[True] * 3, [False, False, True]]
    assert batch["prompt_texts"] == ["abc", "d"] and batch["row_fields"] == [{"answer": "4"}, {}]
