"""common/data/packed_batch.py: rows to packed batches; a first token is never a target."""

import torch

from common.data.packed_batch import collate_pairs, collate_prompts, collate_sft, collate_texts, prompt_texts

EOS = 9


def test_sft_batch_by_hand():
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


def test_all_of_a_text_but_its_first_token_is_a_target():
    batch = collate_texts([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])
    assert batch.data["loss_mask"].tolist() == [False, True, True] * 2


def test_pair_batch_by_hand():
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


def test_prompts_keep_their_texts():
    rows = [
        {"prompt_ids": [1, 2, 3], "row_id": "a", "prompt_text": "äbc", "fields": '{"answer": "4"}'},
        {"prompt_ids": [EOS], "row_id": "b", "prompt_text": "d", "fields": "{}"},
    ]
    batch = collate_prompts(rows)
    assert batch.data["prompt_ids"].tolist() == [1, 2, 3, EOS] and batch.texts("row_ids") == ["a", "b"]
    assert prompt_texts(batch) == [("äbc", {"answer": "4"}), ("d", {})]
