"""A step whose numbers are not finite is refused on all ranks alike, counted and written down.

The run continues without it; where none is borne it stops with its state saved, and a restart resumes it: to
the same bits.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from program_runs import assert_json, read_metrics, read_weights
from test_resume import assert_same_run

from common.runs.checkpoints import find_checkpoints

pytestmark = pytest.mark.slow

REFUSED = 3
NAN_SLOPE = "exec:args[1].register_hook(lambda slope: slope * float('nan'))"  # args: engine, loss
BACKWARD = "deepspeed.runtime.engine:DeepSpeedEngine.backward"


@pytest.fixture(scope="module")
def flags(tiny) -> dict[int, dict[str, Any]]:
    """Return the flags of short runs: on two ranks, with two micro-batches a step."""
    shared = {"data_path": tiny.rows, "data_output_path": tiny.cache, "save_interval": 2}
    single = shared | {
        "data_split": "4,4,2",
        "model_name_or_path": tiny.gpt2,
        "max_seq_len": 64,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "eval_fraction": 0.0,
        "max_train_steps": 4,
        "num_train_epochs": 9,
        "dropout": 0.1,
    }
    ppo = shared | {
        "actor_model_name_or_path": tiny.base,
        "critic_model_name_or_path": tiny.reward,
        "data_split": "1,1,8",
        "per_device_generation_batch_size": 2,
        "per_device_training_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "ppo_epochs": 2,
        "max_prompt_seq_len": 32,
        "max_answer_seq_len": 8,
        "max_train_steps": 3,
        "enable_hybrid_engine": True,
        "enable_ema": True,
        "value_norm": "exp",
        "kl_target": 0.1,
    }
    return {1: single, 2: single, 3: ppo}


def stage_flags(step: int, stage: int) -> dict[str, int]:
    """Return the flags of a ZeRO stage."""
    names = ["zero_stage"] if step < 3 else ["actor_zero_stage", "critic_zero_stage"]
    return dict.fromkeys(names, stage)


# What is spoilt: (the step's program, the call that is made NaN, the refused step, what the message says, the
# ZeRO stages under which it is tried, and the one of them in which the run then stops and is started again).
# Stages differ in how they drop the gradients: each of them for step 1 and for the actor, the rest by turns.
# Two micro-batches a step: the third call is of the second step. Four micro-batches of a PPO step go backward
# for the actor and four for the critic, two by two.
NORM = "the gradient's norm"
SFT_LOSS = {"at": "step1_sft.sft_trainer:compute_nll_sum", "call": 3}
PAIR_LOSSES = {"at": "step2_reward.reward_trainer:compute_pair_losses", "call": 4}
SCORE, REFERENCE = ({"at": f"step3_ppo.roles:{role}.score", "call": 2} for role in ("Reward", "Reference"))
SURROGATE = {"at": "step3_ppo.ppo_losses:clipped_surrogate", "call": 6}
VALUE_LOSS = {"at": "step3_ppo.ppo_losses:value_loss_terms", "call": 5}
SLOPE = {"at": BACKWARD, "do": NAN_SLOPE}
SPOILT = {
    "the loss of step 1": (1, SFT_LOSS, 2, "sft/loss", [3], 3),
    "the gradient of step 1": (1, SLOPE | {"call": 4}, 2, NORM, [0, 2], 0),
    "the loss of step 2": (2, PAIR_LOSSES, 2, "reward/loss", [3], None),
    "the gradient of step 2": (2, SLOPE | {"call": 3}, 2, NORM, [2], 2),
    "a score of the reward model": (3, SCORE, 2, "scores of the rollout are not", [0], 0),
    "a log-probability of the reference": (3, REFERENCE, 2, "ref_logprobs", [2], None),
    "a log-probability in the actor's loss": (3, SURROGATE, 2, "policy/loss", [0], None),
    "a value in the critic's loss": (3, VALUE_LOSS, 2, "value/loss", [2], None),
    "the actor's gradient": (3, SLOPE | {"call": 10}, 2, NORM, [0, 3], 3),
    "the critic's gradient": (3, SLOPE | {"call": 12}, 2, NORM, [3], 3),
}


def hook_of(what: str, rank: int) -> dict[str, Any]:
    """Return the hook that spoils it on a rank."""
    hook = SPOILT[what][1]
    return {"do": "nan", "when": "before" if "do" in hook else "after", "rank": rank} | hook


def bad_steps(folder: Path) -> list[tuple[int, int]]:
    """Return (step, steps refused so far) of every refusal."""
    return [(row["step"], row["perf/bad_steps"]) for row in read_metrics(folder, "perf/bad_steps")]


def bad_batches(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of the refused batches, by file."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "bad_batches").iterdir()
    }


def assert_finite(folder: Path) -> None:
    """Fail where an export or the last checkpoint has NaN."""
    for export in folder.glob("export*"):
        assert all(bool(weight.isfinite().all()) for weight in read_weights(export).values()), export
    assert find_checkpoints(folder)[0]
    assert_json(folder)
    rows = read_metrics(folder)
    assert all(math.isfinite(value) for row in rows for value in row.values() if value is not None)


TOKENS = {1: "input_ids", 2: "chosen_ids", 3: "response_ids"}


@pytest.mark.parametrize(("what", "stage"), [(what, stage) for what in SPOILT for stage in SPOILT[what][4]])
def test_one_rank_spoils_a_step_and_all_refuse_it(forks, flags, tmp_path, what, stage):
    """Where none is borne the run ends with its state saved, and a restart comes to the same bits."""
    step, _, refused, says, _, stopped_stage = SPOILT[what]
    values = flags[step] | stage_flags(step, stage)
    folder, resumed = tmp_path / "borne", tmp_path / "resumed"
    borne = forks.run(step, values | {"output_dir": folder}, ranks=2, hooks=[hook_of(what, rank=1)])
    assert borne.codes == [0, 0], borne.text()
    assert f"step {refused} refused: " in borne.text() and says in borne.text(), borne.text()
    assert bad_steps(folder) == [(refused, 1)]
    found = bad_batches(folder)
    assert sorted(found) == [f"step-00000{refused}-001-rank-0000{rank}.jsonl" for rank in range(2)]
    for head, *rows in found.values():
        assert head["step"] == refused and says in head["reason"] and rows
        assert all(row[TOKENS[step]] for row in rows)
    assert [row["step"] for row in read_metrics(folder, "perf/step_seconds")][-1] == values["max_train_steps"]
    assert_finite(folder)
    if stage != stopped_stage:
        return

    values = values | {"output_dir": resumed, "max_bad_steps": 0}
    stopped = forks.run(step, values, ranks=2, hooks=[hook_of(what, rank=1)])
    assert stopped.codes == [REFUSED, REFUSED], stopped.text()
    assert "skipped 1 steps, --max_bad_steps allows 0" in stopped.text()
    assert "Traceback" not in stopped.text()
    again = forks.run(step, values, ranks=2)
    assert again.codes == [0, 0] and "resumes from" in again.text(), again.text()
    assert_same_run(resumed, folder)


def test_numbers_that_json_has_no_word_for_leave_json(forks, flags, tmp_path):
    """In a held-out loss, which an export's metadata and a checkpoint have too."""
    hook = {"at": "step1_sft.sft_trainer:SFTTrainer.evaluate", "call": 2, "when": "after", "do": "nan"}
    values = flags[1] | {"output_dir": tmp_path / "output", "eval_fraction": 0.2, "max_train_steps": 2}
    values |= {"lora_dim": 4, "only_optimize_lora": True}  # an adapter has metadata too
    done = forks.run(1, values, hooks=[hook, hook_of("the loss of step 1", rank=0)])
    assert done.codes == [0], done.text()
    metadata = json.loads((tmp_path / "output/export/triptych.json").read_text())
    assert metadata["eval_perplexity"] is None
    assert_json(tmp_path / "output")


def test_a_reward_function_that_gives_nan_on_one_rank(forks, flags, tmp_path):
    """Its error is that rank's alone until the ranks have told each other."""
    hook = {"at": "step3_ppo.rewards.score_sum:checked_scores", "call": 2, "rank": 1}
    hook |= {"do": "exec:args[1][0] = float('nan')"}
    values = flags[3] | {"output_dir": tmp_path / "output"}
    values |= {"reward": "function:step3_ppo.rewards.examples.length:brevity"}
    done = forks.run(3, values, ranks=2, hooks=[hook])
    assert done.codes == [0, 0], done.text()
    assert "every score must be a finite number" in done.text()
    assert bad_steps(tmp_path / "output") == [(2, 1)]


def test_several_are_counted_over_the_whole_run(forks, flags, tmp_path):
    """The count is kept in the checkpoints: a restart forgives nothing."""
    folder = tmp_path / "output"
    values = flags[1] | {"output_dir": folder, "max_bad_steps": 1}
    spoil = {"at": "step1_sft.sft_trainer:compute_nll_sum", "do": "nan", "when": "after"}
    first = forks.run(1, values, hooks=[spoil | {"call": 1}, spoil | {"call": 5}])
    assert first.code == REFUSED and "skipped 2 steps, --max_bad_steps allows 1" in first.text()
    second = forks.run(1, values, hooks=[spoil | {"call": 1}])
    assert second.code == REFUSED and "skipped 3 steps" in second.text(), second.text()
    assert forks.run(1, values | {"max_bad_steps": 9}).code == 0
    assert bad_steps(folder) == [(1, 1), (3, 2), (4, 3)]
    assert [row["step"] for row in read_metrics(folder, "sft/loss")] == [2]


def test_a_ppo_step_all_of_whose_minibatches_are_refused(forks, flags, tmp_path):
    """Its numbers are those of its rollout; the next step learns."""
    at = "step3_ppo.ppo_losses:clipped_surrogate"
    hooks = [{"at": at, "call": call, "do": "nan", "when": "after"} for call in range(5, 9)]
    done = forks.run(3, flags[3] | {"output_dir": tmp_path / "output"}, hooks=hooks)
    assert done.codes == [0], done.text()
    assert [step for step, _ in bad_steps(tmp_path / "output")] == [2, 2]
    rows = read_metrics(tmp_path / "output", "objective/score")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert ["policy/loss" in row for row in rows] == [True, False, True]
    assert_finite(tmp_path / "output")
