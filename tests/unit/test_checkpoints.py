"""A checkpoint is whole or not there; what is in doubt is named and passed over; no rank is left alone."""

import functools
import hashlib
import json
import random
import shutil
import weakref
from itertools import pairwise
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import numpy
import pytest
import torch
from pretended_gpu import pretended_gpu
from simple_parts import SimplePart, make_parts, versions

from common.runs import checkpoints, saved_state
from common.runs.checkpoints import (
    FORMAT,
    find_checkpoints,
    load_newest,
    newest_intact,
    read_checkpoint,
    save_checkpoint,
)
from common.runs.durable_files import SaveFailed
from common.runs.saved_state import RandomState, Segment, TensorReader, TensorSlice, write_slices

MODEL = "model-rank-00000.safetensors"


def save(run_folder: Path, *steps: int, limit: int = 2) -> None:
    """Save states whose numbers are the steps."""
    for step in steps:
        save_checkpoint(run_folder, f"step-{step:06d}", make_parts(step), {"seed": 3}, limit)


def names(run_folder: Path) -> list[str]:
    """What a run's folder of checkpoints holds."""
    return sorted(p.name for p in (run_folder / "checkpoints").iterdir())


def newest(run_folder: Path) -> tuple[int, list[str]]:
    """The state that a run goes on with, and what is wrong with others at a first look."""
    found, damages = find_checkpoints(run_folder)
    parts = make_parts(-1)
    load_newest(found, parts)
    (version,) = versions(parts)
    return version, damages


def flip_last_bit(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def two(tmp_path) -> Path:
    """The folder of a run with the checkpoints 1 and 2."""
    save(tmp_path, 1, 2)
    return tmp_path


# ---- Saving and finding


def test_save_checkpoint_writes_the_expected_files(tmp_path):
    save(tmp_path, 7)
    folder = tmp_path / "checkpoints" / "step-000007"
    assert sorted(p.name for p in folder.iterdir()) == ["loop-rank-00000.safetensors", "meta.json", MODEL]
    found = read_checkpoint(folder)
    assert found.files("model") == [folder / MODEL]
    files = found.meta.pop("files")
    assert files[MODEL]["sha256"] == hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()
    assert len(files) == 2
    numbers = {"model": {"version": 7}, "loop": {"version": 7}}
    assert found.meta == {"args": {"seed": 3}, "format": FORMAT, "numbers": numbers}


def test_find_checkpoints_orders_by_step_not_alphabet(tmp_path):
    order = ["step-000002", "step-000002-rollout", "step-000002-update-0001", "step-000002-update-10000"]
    order += ["step-999999", "step-1000000", "step-1000000-rollout"]
    for name in sorted(order):
        save_checkpoint(tmp_path, name, make_parts(order.index(name)), {}, 0)
    assert [c.folder.name for c in find_checkpoints(tmp_path)[0]] == order[::-1]
    save_checkpoint(tmp_path, "step-1000000-update-0001", make_parts(9), {}, 2)
    assert names(tmp_path) == ["step-1000000-rollout", "step-1000000-update-0001"]


@pytest.mark.parametrize(("limit", "kept"), [(0, [1, 2, 3, 10]), (1, [10]), (3, [2, 3, 10])])
def test_save_total_limit_keeps_that_many_checkpoints(tmp_path, limit, kept):
    save(tmp_path, 1, 2, 3, 10, limit=limit)
    assert names(tmp_path) == [f"step-{n:06d}" for n in kept] and newest(tmp_path) == (10, [])


def test_random_state_load_continues_the_random_numbers(tmp_path):
    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    draw()
    write_slices(tmp_path / "random", RandomState().tensor_slices())
    expected = draw()
    RandomState().load(TensorReader([tmp_path / "random"]), RandomState().json_state())
    assert draw() == expected


def test_random_state_load_continues_those_of_a_gpu(tmp_path):
    found: list[list[int]] = []
    state = {
        "get_rng_state": lambda: torch.arange(16, dtype=torch.uint8),
        "set_rng_state": lambda state: found.append(state.tolist()),
    }
    with pretended_gpu() as gpu, mock.patch.multiple(torch.cuda, **state):
        write_slices(tmp_path / "random", RandomState().tensor_slices())
        RandomState().load(TensorReader([tmp_path / "random"]), RandomState().json_state())
        assert found == [list(range(16))] and not gpu.waits and not gpu.copies
    RandomState().load(TensorReader([tmp_path / "random"]), RandomState().json_state())  # where there is none
    write_slices(tmp_path / "of a CPU", RandomState().tensor_slices())
    with pretended_gpu():
        RandomState().load(TensorReader([tmp_path / "of a CPU"]), RandomState().json_state())


# ---- Damage


def write_meta(folder: Path, text: str) -> None:
    """A meta.json with the right digest of another content."""
    outer = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
    (folder / "meta.json").write_text(json.dumps(outer))


FIRST_LOOK = {
    "no meta": (lambda f: (f / "meta.json").unlink(), "meta.json cannot be read: No such file"),
    "a meta with another number": (
        lambda f: (f / "meta.json").write_text((f / "meta.json").read_text().replace(": 2}", ": 3}")),
        "meta.json has changed since it was written",
    ),
    **{
        f"a meta of another form: {text[:20]}": (
            lambda f, text=text: write_meta(f, text),
            "not a checkpoint of this program",
        )
        for text in ("[]", "5", "{}", "[" * 100_000, '{"format": 1}', '{"args": 1, "numbers": 2}')
    },
    "a torn meta": (
        lambda f: (f / "meta.json").write_bytes(b'{"content": "\xff'),
        "not a checkpoint of this program, or is incomplete",
    ),
}


def test_checkpoint_of_a_later_format_is_rejected(two, monkeypatch):
    monkeypatch.setattr(checkpoints, "FORMAT", 99)
    save(two, 3)
    monkeypatch.undo()
    assert newest(two)[0] == 2 and f"its format is 99, but this program reads {FORMAT}" in newest(two)[1][0]


@pytest.mark.parametrize("what", FIRST_LOOK)
def test_damage_that_a_first_look_shows_is_named_and_passed_over(two, what):
    damage, message = FIRST_LOOK[what]
    folder = two / "checkpoints" / "step-000002"
    damage(folder)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(folder)
    version, (doubt,) = newest(two)
    assert version == 1 and doubt.startswith(f"checkpoint {folder}: ")


CHANGED = f"{MODEL} has changed since it was written (its SHA-256 differs); it is skipped"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip_last_bit, CHANGED),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), CHANGED),
        (Path.unlink, f"{MODEL} cannot be read: No such file or directory; it is skipped"),
    ],
    ids=["one bit", "cut", "missing"],
)
def test_a_file_that_differs_is_found_before_anything_is_loaded(two, capsys, damage, told):
    damage(two / "checkpoints" / "step-000002" / MODEL)
    assert newest(two) == (1, []) and told in capsys.readouterr().out
    flip_last_bit(two / "checkpoints" / "step-000001" / MODEL)
    with pytest.raises(ValueError, match=r"step-000002: model.*; .*step-000001: model.*has changed"):
        newest(two)


def test_checkpoint_damaged_on_one_rank_is_rejected_on_all(two, monkeypatch):
    """Each of two ranks reads every other file, and hears what the other has found."""
    (found, older), _ = find_checkpoints(two)
    flip_last_bit(found.folder / MODEL)
    assert found.damaged_file(slice(0, None, 2)) is None and found.damaged_file(slice(1, None, 2))
    monkeypatch.setattr("common.ranks.distributed.world_size", lambda: 2)
    monkeypatch.setattr("common.ranks.distributed.gather_objects", lambda mine: [mine, heard.pop(0)])
    heard = ["model has changed", None]
    assert newest_intact([found, older], []) is older and not heard


def test_load_newest_rejects_another_runs_checkpoint(two):
    found, _ = find_checkpoints(two)
    with pytest.raises(ValueError, match="step-000002 does not belong to this run: critic: 'critic'"):
        load_newest(found, {"critic": SimplePart()})


# ---- Leftovers and failures


def test_find_checkpoints_ignores_leftovers_of_a_crash(two):
    source = two / "checkpoints" / "step-000002"
    for name in ("step-000003.writing", "step-000000.deleting", "step-000009.superseded"):
        shutil.copytree(source, two / "checkpoints" / name)
    (two / "checkpoints" / "step-000003.writing" / "other").touch()
    assert newest(two) == (2, [])
    save(two, 3)
    assert newest(two) == (3, []) and not (two / "checkpoints" / "step-000003" / "other").exists()


def fail_at(monkeypatch, function: str, error: Exception) -> None:
    monkeypatch.setattr(checkpoints, function, Mock(side_effect=error))


FAILURES = {
    "sync": PermissionError(13, "Permission denied"),
    "_digest": RuntimeError("Error while serializing: I/O error"),
    "publish_folder": OSError(5, "Input/output error"),
}


@pytest.mark.parametrize("function", FAILURES)
def test_failed_save_leaves_earlier_checkpoints_and_nothing_else(two, monkeypatch, function):
    fail_at(monkeypatch, function, FAILURES[function])
    with pytest.raises(SaveFailed, match=f"rank 0 failed: .*{str(FAILURES[function])[-12:]}"):
        save(two, 3)
    monkeypatch.undo()
    assert names(two) == ["step-000001", "step-000002"] and newest(two) == (2, [])
    save(two, 3)
    assert names(two) == ["step-000002", "step-000003"] and newest(two) == (3, [])


def test_save_checkpoint_does_not_recreate_a_missing_run_folder(two):
    """A network folder that is no longer mounted leaves an empty place: nothing is to be written there."""
    two.rename(two.with_name("away"))
    with pytest.raises(SaveFailed, match="No such file or directory"):
        save(two, 3)
    assert not two.exists()


def test_old_checkpoint_that_cannot_be_removed_is_a_warning(two, monkeypatch, capsys):
    fail_at(monkeypatch, "remove_folder", OSError(16, "Device or resource busy"))
    save(two, 3)
    assert names(two) == ["step-000001", "step-000002", "step-000003"]
    assert "step-000001 could not be removed: Device or resource busy" in capsys.readouterr().out
    monkeypatch.undo()
    save(two, 4)
    assert names(two) == ["step-000003", "step-000004"], "it goes when it can"


def test_a_rank_that_does_not_see_the_folder_says_what_is_needed(tmp_path):
    with pytest.raises(OSError, match="--output_dir must be on a disk that all machines share"):
        checkpoints._write_parts(tmp_path / "elsewhere", make_parts())


# ---- Flat tensors, cut into runs over any number of files, are read back in any other cut


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
DTYPES += [torch.bool]


def make(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of all kinds of numbers, NaN among those of floats."""
    drawn = torch.randint(-100, 100, (numel,), generator=torch.Generator().manual_seed(seed))
    tensor = drawn.to(dtype)
    if dtype.is_floating_point and numel > 2:
        tensor[1], tensor[2] = float("nan"), float("-inf")
    return tensor


assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def write_ranks(folder: Path, ranks: list[list[TensorSlice]]) -> TensorReader:
    """A reader of what ranks have written; one that owns nothing writes no file."""
    files = []
    for rank, pieces in enumerate(ranks):
        if pieces:
            files.append(folder / f"rank-{rank}.safetensors")
            write_slices(files[-1], pieces)
    return TensorReader(files)


def cut(numel: int, rng: random.Random) -> list[tuple[int, int]]:
    """Runs (start, end) that cover all of a flat tensor."""
    inner = rng.choices(range(numel + 1), k=rng.randrange(6))
    return list(pairwise(sorted({0, *inner, numel}))) or [(0, 0)]


def test_a_gpus_tensors_pass_through_the_host_piece_by_piece(tmp_path, monkeypatch):
    """A checkpoint of 13B would fill 156 GB of it."""
    monkeypatch.setattr(saved_state, "CHUNK_ELEMENTS", 100)
    live = [0]
    with pretended_gpu() as gpu:
        move, values = gpu.move, {f"w{n}": torch.full((250 + n,), float(n)) for n in range(8)}
        slices = [TensorSlice(name, 0, value.to("cuda")) for name, value in values.items()]

        def move_and_count(source: torch.Tensor, kind: str, **more: bool) -> torch.Tensor:
            moved = move(source, kind, **more)
            alive = [moved.untyped_storage().nbytes(), *(size for ref, size in copies if ref())]
            live.append(sum(alive))
            copies.append((weakref.ref(moved.untyped_storage()), alive[0]))
            return moved

        copies: list = []
        monkeypatch.setattr(gpu, "move", move_and_count)
        write_slices(tmp_path / "file", slices)
    assert max(live) == 100 * 4 and len(copies) == 8 * 3
    reader = TensorReader([tmp_path / "file"])
    assert all(reader.read(name).equal(value) for name, value in values.items())


@pytest.mark.parametrize("seed", range(40))
def test_checkpoint_slices_are_read_back_under_any_sharding(tmp_path, seed):
    rng = random.Random(seed)
    names = ["model.weight:exp_avg", "a", "a@1", "ä b/c", "__metadata__"]  # a@1@0 and a@10 are of two
    tensors = {name: make(rng.randrange(40), rng.choice(DTYPES), seed) for name in names}
    ranks: list[list[TensorSlice]] = [[], [], []]
    for name, tensor in tensors.items():
        for start, end in cut(len(tensor), rng):
            rng.choice(ranks).append(TensorSlice(name, start, tensor[start:end]))  # views of one buffer
    for of_rank in ranks:
        rng.shuffle(of_rank)
    reader = write_ranks(tmp_path, ranks)
    for name, tensor in tensors.items():
        assert reader.numel(name) == len(tensor)
        assert_same(reader.read(name), tensor)
        for start, end in cut(len(tensor), rng):
            assert_same(reader.read(name, start, end - start), tensor[start:end])
            assert_same(reader.read(name, start, 0), tensor[:0])
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


def test_a_rank_saves_its_share_of_what_all_hold_at_its_place():
    owner = torch.arange(10.0)
    segment = Segment("w", 30, 10, 10, owner, saved=slice(3, 7))  # elements 10 to 20 of 30
    (saved,) = segment.save("w:weight", owner)
    assert (saved.key, saved.start, saved.tensor.tolist()) == ("w:weight", 13, [3.0, 4.0, 5.0, 6.0])
    assert not list(segment._replace(saved=slice(10, 10)).save("w:weight", owner)), "of a small tensor, none"
