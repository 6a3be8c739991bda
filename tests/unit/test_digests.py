"""Digests of a step: every bit and every exchange shows, numbers are those of a plain loop."""

import math

import pytest
import torch
from pretended_gpu import pretended_gpu

from common.data.packed_batch import PackedBatch
from common.ranks.digests import StepDigests, total_of, word_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]


def by_hand(tensor: torch.Tensor, *, weighs_positions: bool) -> int:
    """The sum over 64-bit words of a plain loop over bytes."""
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    factors = [2 * i + 1 if weighs_positions else 1 for i in range(len(words))]
    return sum(word * factor for word, factor in zip(words, factors, strict=True)) % 2**64


@pytest.mark.parametrize("weighs_positions", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words_are_summed_as_by_a_plain_loop(dtype, weighs_positions):
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(37, generator=generator) * 100).to(dtype)
    for part in (whole, whole[:36], whole[1:6], whole[:0], whole[::2], whole[:36].view(6, 6).T, whole > 3):
        summed = int(word_sum(part, weighs_positions=weighs_positions)) % 2**64
        assert summed == by_hand(part.contiguous(), weighs_positions=weighs_positions)


def test_any_flipped_bit_and_any_exchange_changes_the_sum():
    tensor = torch.randn(9)
    before, weighed = int(word_sum(tensor)), int(word_sum(tensor, weighs_positions=True))
    for index in range(9):
        for bit in range(32):
            flipped = tensor.clone()
            flipped.view(torch.int32)[index] ^= -(2**31) if bit == 31 else 1 << bit
            assert int(word_sum(flipped)) != before
    exchanged = tensor[[2, 1, 0, 3, 4, 5, 6, 7, 8]]
    assert int(word_sum(exchanged, weighs_positions=True)) != weighed


def test_totals_are_norms_and_sums():
    assert total_of(torch.tensor([3.0, -4.0])).item() == 5.0
    assert total_of(torch.tensor([3.0, -4.0], dtype=torch.bfloat16)).item() == 5.0
    assert total_of(torch.tensor([3e-300, 4e-300], dtype=torch.float64)).item() == pytest.approx(5e-300)
    assert total_of(torch.tensor([200, 100], dtype=torch.uint8)).item() == 300
    assert total_of(torch.tensor([True, True])).item() == 2


def make_batch(ids, sequences):
    return PackedBatch.build(ids, {"input_ids": [torch.tensor(sequence) for sequence in sequences]})


def test_batches_count_as_one_and_their_borders_show():
    digests = StepDigests()
    digests.is_on = True
    digests.add_batches("whole", [make_batch("abc", [[1, 2], [3], [4]])])
    digests.add_batches("parts", [make_batch("ab", [[1, 2], [3]]), make_batch("c", [[4]])])
    digests.add_batches("moved", [make_batch("abc", [[1], [2, 3], [4]])])
    phases = digests.read()
    assert phases["whole"] == phases["parts"] and phases["whole"]["input_ids"][1] == 10
    assert phases["whole"]["input_ids"][0] != phases["moved"]["input_ids"][0]


def test_nothing_is_recorded_while_off_and_phases_are_numbered():
    digests = StepDigests()
    digests.add_batches("rollout", [make_batch("a", [[1]])])
    digests.add_numbers("numbers", {"loss": 1.0})
    digests.add_tensors("state", [("weight", torch.ones(2))])
    assert digests.read() == {}
    digests.is_on = True
    assert digests.number_phase("policy/loss") == "policy/loss 1"
    digests.add_numbers("policy/loss 1: gradients", {"norm": 1.0})
    digests.add_numbers("value/loss 1: gradients", {"norm": math.inf})
    assert digests.number_phase("policy/loss") == "policy/loss 2"
    tensors = [("a", torch.tensor([3.0, 4.0])), ("a:exp_avg", torch.tensor([1.0, 2.0]))]
    digests.add_tensors("state", tensors, without_total=":exp_avg")
    state = digests.read()["state"]
    assert state["a"][1] == 5.0 and state["a:exp_avg"][1] is None


def test_the_host_waits_once_for_the_bits_and_once_for_each_kind_of_total():
    with pretended_gpu() as gpu:
        digests = StepDigests()
        digests.is_on = True
        tensors = [(str(n), torch.full((n,), 1.0, device="cuda")) for n in (3, 8, 64)]
        gpu.clear()
        digests.add_tensors("weights", tensors, without_total="none of them")
        assert not gpu.waits
        assert [entry[1] for entry in digests.read()["weights"].values()] == pytest.approx(
            [3**0.5, 8**0.5, 8]
        )
        assert len(gpu.waits) == 2
