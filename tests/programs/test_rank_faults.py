"""A rank that dies, fails or stands still ends all ranks, and one line names it, its step and its place."""

import re
from typing import Any

import pytest
from tiny_inputs import from_words, step_flags

pytestmark = pytest.mark.slow

OTHER_RANK_FAILED, KILLED = 4, -9
SECONDS = 60.0  # from the start of a run that has a fault to its end; a run without takes two
TRAINING = {
    1: ("step1_sft.sft_trainer:SFTTrainer.train_step", "at step 3 in the training step"),
    3: ("step3_ppo.ppo_losses:PPOLosses._value_sums", "at step 3 in the update of the critic"),
}
BEFORE_AN_UPDATE = "step3_ppo.ppo_losses:PPOLosses.compute_critic_gradients"


@pytest.fixture(scope="module")
def flags(tiny):
    """Return the flags of a short run of a step."""
    single = "--data_split 4,4,2 --max_seq_len 64 --per_device_train_batch_size 1 --max_train_steps 5"
    ppo = "--data_split 1,1,8 --per_device_generation_batch_size 2 --per_device_training_batch_size 2"
    ppo += " --max_train_steps 4 --enable_hybrid_engine true --inference_tp_size 2 --actor_zero_stage 3"
    more = {1: single + " --zero_stage 2", 3: ppo + " --critic_zero_stage 2"}
    shared = {"num_train_epochs": 9, "eval_fraction": 0.2}
    return {step: step_flags(tiny, step, **shared, **from_words(words)) for step, words in more.items()}


def run_with_fault(
    forks: Any, flags: Any, step: int, do: str, *, rank: int = 1, ranks: int = 2, **more: Any
) -> Any:
    """Return a run in which a rank does something at step 3."""
    hook = {"at": TRAINING[step][0], "call": 3, "do": do, "rank": rank}
    done = forks.run(step, flags[step] | more, ranks=ranks, hooks=[hook], seconds=90)
    assert done.seconds < SECONDS, everything(done)
    return done


def everything(done: Any) -> str:
    """Return what all ranks have said."""
    return f"{done.codes}, {done.seconds:.1f} s\n" + "\n".join(
        f"--- rank {rank}\n{done.text(rank)}" for rank in range(len(done.codes))
    )


def errors(done: Any, rank: int) -> list[str]:
    """Return the lines in which a rank names a failure."""
    return [line for line in done.text(rank).splitlines() if line.startswith("error:")]


def assert_named(done: Any, *, failed: int, place: str, what: str, speaker: int = 0) -> None:
    """Fail unless one line, of one rank, names the rank that failed first, what happened to it and where."""
    text = everything(done)
    (line,) = errors(done, speaker)
    assert line.startswith(f"error: rank {failed} {what}") and place in line, text
    for rank in range(len(done.codes)):
        if rank != speaker and rank != failed:
            assert not errors(done, rank), text
        if rank != failed:
            assert done.codes[rank] == OTHER_RANK_FAILED, text
            assert "Traceback" not in done.text(rank), text


@pytest.mark.parametrize(("step", "rank", "ranks", "speaker"), [(3, 1, 2, 0), (1, 0, 3, 1)])
def test_killed(forks, flags, step, rank, ranks, speaker):
    """The first rank holds the store; without it one of the two that are left speaks."""
    done = run_with_fault(forks, flags, step, "kill", rank=rank, ranks=ranks)
    assert_named(done, failed=rank, place=TRAINING[step][1], what="died", speaker=speaker)
    assert done.codes[rank] == KILLED


BUG = "raise:a bug, says the test"


@pytest.mark.parametrize(("do", "rank"), [("memory", 1), (BUG, 0)])
def test_an_error_of_one_rank(forks, flags, do, rank):
    """Want of memory ends in one line, a mistake of ours with its traceback as well."""
    code, what = (1, "RuntimeError: a bug") if do == BUG else (3, "MemoryError: no memory left")
    done = run_with_fault(forks, flags, 3, do, rank=rank)
    assert_named(done, failed=rank, place=f"{TRAINING[3][1]}: {what}", what="failed first")
    assert done.codes[rank] == code and done.text(rank).count("Traceback") == (code == 1)
    assert len(errors(done, 1)) == (code == 3)


def test_stopped(forks, flags):
    """SIGSTOP: it answers nobody, and is ended by those that are left."""
    done = run_with_fault(forks, flags, 1, "stop", rank=0, collective_timeout=4)
    assert_named(done, failed=0, place=TRAINING[1][1], what="is stuck: no sign of life", speaker=1)
    assert done.codes[0] == KILLED


def test_endless_call(forks, flags):
    """Its thread lives, but it does not come to where the others wait."""
    done = run_with_fault(forks, flags, 1, "sleep:60", collective_timeout=4)
    assert_named(done, failed=1, place=TRAINING[1][1], what="is stuck")
    assert "--collective_timeout 4 s" in errors(done, 0)[0] and done.codes[1] == OTHER_RANK_FAILED


def test_endless_save_on_gpus(forks, flags, tmp_path):
    """The others wait in gloo's group beside nccl's, which is watched like all others."""
    hook = {"at": "common.runs.checkpoints:write_slices", "do": "sleep:60", "rank": 1}
    saving = {"output_dir": tmp_path / "output", "save_interval": 1, "collective_timeout": 4}
    done = forks.run(1, flags[1] | saving, ranks=2, hooks=[hook], seconds=90, gpu={})
    assert_named(done, failed=1, place="at step 1 in the checkpoint step-000001", what="is stuck")


def test_bad_input_on_one_rank(forks, flags):
    """A rank that leaves by itself, here because of a file that only it cannot read."""
    do = "exec:raise ValueError('a file that only this machine lacks')"
    hook = {"at": "common.programs.training_loop:load_policy", "rank": 1, "do": do}
    done = forks.run(1, flags[1] | {"collective_timeout": 20}, ranks=2, hooks=[hook], seconds=90)
    assert done.codes == [OTHER_RANK_FAILED, 2], everything(done)
    (line,) = errors(done, 0)
    assert line == (
        "error: rank 1 left before the others, with exit code 2, in the loading of the model: a file that "
        "only this machine lacks"
    )


# With the interpreter's lock: no thread can beat.
HOLD = "exec:import ctypes; ctypes.PyDLL(None).sleep({})"


def test_what_takes_longer_than_the_limit(forks, flags, tmp_path):
    """All ranks compute as long, or wait for the first one's data; the first to end, which holds the store,
    ends nobody.
    """
    at, writing = TRAINING[1][0], "common.data.token_cache:TokenWriter.__init__"
    hooks = [{"at": at, "call": 3, "do": HOLD.format(7)}]
    hooks += [{"at": writing, "rank": 0, "call": 2, "do": HOLD.format(7)}]
    hooks += [{"at": "common.runs.run:Run.finish", "rank": 1, "do": "sleep:6"}]
    more = {"collective_timeout": 5, "data_output_path": tmp_path / "cache"}
    done = forks.run(1, flags[1] | more, ranks=2, hooks=hooks, seconds=120)
    assert done.codes == [0, 0] and not errors(done, 0) + errors(done, 1), everything(done)
    assert done.seconds > 20


CHECKED = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def test_equal_collectives(forks, flags):
    done = forks.run(3, flags[3], ranks=2, seconds=90, env=CHECKED)
    assert done.codes == [0, 0], everything(done)


def test_one_collective_more(forks, flags):
    call = "distributed.reduce_sum(torch.ones(777))"
    do = f"exec:import torch; from common.ranks import distributed; {call}"
    hook = {"at": BEFORE_AN_UPDATE, "call": 3, "rank": 1, "do": do}
    more = {"collective_timeout": 30}
    done = forks.run(3, flags[3] | more, ranks=2, hooks=[hook], seconds=90, env=CHECKED)
    assert set(done.codes) <= {1, OTHER_RANK_FAILED} and done.seconds < SECONDS, everything(done)
    (line,) = errors(done, 0)
    what = r"error: rank \d failed first, at step [34]\b.*Detected mismatch between collectives"
    assert re.match(what, line), everything(done)
    # Each rank's error has the call that it was about to make, and its traceback says where.
    assert "TensorShape=[777]" in done.text(0) + done.text(1), everything(done)
    assert "Traceback" in done.text(1), everything(done)
