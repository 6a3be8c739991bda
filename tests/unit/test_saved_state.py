"""Flat tensors that were cut into runs over any number of files are read back in any other cut."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.runs.saved_state import TensorReader, TensorSlice, write_slices

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
DTYPES += [torch.bool]


def make(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of all kinds of numbers, NaN among those of floats."""
    drawn = torch.randint(-100, 100, (numel,), generator=torch.Generator().manual_seed(seed))
    tensor = drawn.to(dtype)
    if dtype.is_floating_point and numel > 2:
        tensor[1], tensor[2] = float("nan"), float("-inf")
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN here."""
    is_equal = a.shape == b.shape and a.dtype == b.dtype
    return is_equal and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def write_ranks(folder: Path, ranks: list[list[TensorSlice]]) -> TensorReader:
    """A reader of what ranks have written; one that owns nothing writes no file."""
    files = []
    for rank, pieces in enumerate(ranks):
        if pieces:
            files.append(folder / f"rank-{rank}.safetensors")
            write_slices(files[-1], pieces)
    return TensorReader(files)


@st.composite
def cut(draw, numel: int) -> list[tuple[int, int]]:
    """Runs (start, end) that cover all of a flat tensor, empty ones among them."""
    inner = draw(st.lists(st.integers(0, numel), max_size=6))
    places = [0, *sorted(inner), numel]
    return list(zip(places[:-1], places[1:], strict=True))


@st.composite
def saved(draw):
    """Flat tensors by name, and (name, start, end, rank) of the runs that ranks have written."""
    names = ["model.weight:exp_avg", "a@b", "ä b/c", "__metadata__"][: draw(st.integers(1, 4))]
    tensors, runs = {}, []
    num_ranks = draw(st.integers(1, 4))
    for seed, name in enumerate(names):
        numel = draw(st.integers(0, 40))
        tensors[name] = make(numel, draw(st.sampled_from(DTYPES)), seed)
        begun = set()
        for start, end in draw(cut(numel)):
            if start not in begun and (end > start or not numel):
                begun.add(start)
                runs.append((name, start, end, draw(st.integers(0, num_ranks - 1))))
    return tensors, runs, num_ranks


@settings(max_examples=80, deadline=None)
@given(saved(), st.data())
def test_any_cut_is_read_back_in_any_other(case, data):
    tensors, runs, num_ranks = case
    ranks: list[list[TensorSlice]] = [[] for _ in range(num_ranks)]
    for name, start, end, rank in data.draw(st.permutations(runs)):
        ranks[rank].append(TensorSlice(name, start, tensors[name][start:end]))  # views of one buffer
    with tempfile.TemporaryDirectory() as folder:
        reader = write_ranks(Path(folder), ranks)
        for name, tensor in tensors.items():
            assert reader.numel(name) == len(tensor)
            assert same_bits(reader.read(name), tensor)
            for start, end in data.draw(cut(len(tensor))):
                assert same_bits(reader.read(name, start, end - start), tensor[start:end]), (start, end)
            with pytest.raises(ValueError, match="are needed"):
                reader.read(name, len(tensor), 1)


def test_a_run_that_is_not_there_is_named(tmp_path):
    """Elements 4 and 5 of ten were written by nobody."""
    whole = torch.arange(10.0)
    ranks = [[TensorSlice("w", 0, whole[:4])], [TensorSlice("w", 6, whole[6:])]]
    reader = write_ranks(tmp_path, ranks)
    assert reader.read("w", 0, 4).tolist() == [0, 1, 2, 3]
    assert reader.read("w", 7, 2).tolist() == [7, 8]
    for start, numel in ((0, None), (3, 2), (4, 1), (5, 2), (0, 11), (9, 2)):
        with pytest.raises(ValueError, match="elements of w, not the"):
            reader.read("w", start, numel)
    with pytest.raises(ValueError, match="it holds 0 elements of other"):
        reader.read("other")


def test_a_name_is_cut_at_its_last_at_sign(tmp_path):
    """`a@1` from 0 and `a` from 10 would be `a@1@0` and `a@10`."""
    pieces = [TensorSlice("a@1", 0, torch.tensor([1.0])), TensorSlice("a", 0, torch.arange(10.0))]
    pieces.append(TensorSlice("a", 10, torch.tensor([7.0])))
    reader = write_ranks(tmp_path, [pieces])
    assert reader.read("a@1").tolist() == [1.0]
    assert reader.read("a").tolist() == [*range(10), 7.0]
