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
from tiny_inputs import step_flags

from common.runs.checkpoints import find_checkpoints

pytestmark = pytest.mark.slow

REFUSED = 3
NAN_SLOPE = "exec:args[1].register_hook(lambda slope: slope * float('nan'))"  # args: engine, loss
BACKWARD = "deepspeed.runtime.engine:DeepSpeedEngine.backward"


SHORT = {"data_split": "4,4,2", "max_train_steps": 4, "num_train_epochs": 9, "max_seq_len": 64}
SHORT |= {"per_device_train_batch_size": 1, "eval_fraction": 0.0, "dropout": 0.1}
PPO = {"data_split": "1,1,8", "max_train_steps": 3, "max_prompt_seq_len": 32, "ppo_epochs": 2}
PPO |= {"per_device_generation_batch_size": 2, "per_device_training_batch_size": 1, "value_norm": "exp"}
PPO |= {"enable_hybrid_engine": True, "enable_ema": True, "kl_target": 0.1}


def short_flags(tiny: Any, step: int, stage: int, **more: Any) -> dict[str, Any]:
    """Return the flags of a short run under a ZeRO stage, with two micro-batches a step."""
    names = ["zero_stage"] if step < 3 else ["actor_zero_stage", "critic_zero_stage"]
    of_step = PPO if step == 3 else SHORT | {"model_name_or_path": tiny.gpt2}
    shared = {"save_interval": 2, "gradient_accumulation_steps": 2}
    return step_flags(tiny, step, **(shared | of_step | dict.fromkeys(names, stage) | more))


# What is spoilt: (the step's program, the call that is made NaN, the refused step, what the message says, the
# ZeRO stages under which it is tried, and the one of them in which the run then stops and is started again).
# Stages differ in how they drop the gradients: each of them for step 1 and for the actor, the rest by turns.
# Two micro-batches a step: the third call is of the second step. Four micro-batches of a PPO step go backward
# for the actor and four for the critic, two by two.
NORM = "the gradient's norm"
SFT_LOSS = {"at": "step1_sft.sft_trainer:compute_nll_sum", "call": 3}
PAIR_LOSSES = {"at": "step2_reward.pair_trainer:compute_pair_losses", "call": 4}
SCORE, REFERENCE = ({"at": f"step3_ppo.roles:{role}.score", "call": 2} for role in ("Reward", "Reference"))
VALUE_LOSS = {"at": "step3_ppo.ppo_losses:value_loss_terms", "call": 5}
SLOPE = {"at": BACKWARD, "do": NAN_SLOPE}
SPOILT = {
    "the loss of step 1": (1, SFT_LOSS, 2, "sft/loss", [3], 3),
    "the gradient of step 1": (1, SLOPE | {"call": 4}, 2, NORM, [0, 2], 0),
    "the loss of step 2": (2, PAIR_LOSSES, 2, "reward/loss", [3], 3),
    "a score of the reward model": (3, SCORE, 2, "scores of the rollout are not", [0], 0),
    "a log-probability of the reference": (3, REFERENCE, 2, "ref_logprobs", [2], None),
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
def test_one_rank_spoils_a_step_and_all_refuse_it(forks, tiny, tmp_path, what, stage):
    """Where none is borne the run ends with its state saved, and a restart comes to the same bits."""
    step, _, refused, says, _, stopped_stage = SPOILT[what]
    values = short_flags(tiny, step, stage)
    folder, resumed = tmp_path / "borne", tmp_path / "resumed"
    borne = forks.run(step, values | {"output_dir": folder}, ranks=2, hooks=[hook_of(what, rank=1)])
    assert borne.codes == [0, 0], borne.text()
    assert f"step {refused} skipped: " in borne.text() and says in borne.text(), borne.text()
    assert bad_steps(folder) == [(refused, 1)]
    found = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "bad_batches").iterdir()
    }
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


def test_numbers_that_json_has_no_word_for_leave_json(forks, tiny, tmp_path):
    """In a held-out loss, which an export's metadata and a checkpoint have too."""
    hook = {"at": "step1_sft.sft_trainer:SFTTrainer.evaluate", "call": 2, "when": "after", "do": "nan"}
    more = {"lora_dim": 4, "only_optimize_lora": True}  # an adapter has metadata too
    more |= {"output_dir": tmp_path / "output", "eval_fraction": 0.2, "max_train_steps": 2}
    done = forks.run(1, short_flags(tiny, 1, 0, **more), hooks=[hook, hook_of("the loss of step 1", rank=0)])
    assert done.codes == [0], done.text()
    metadata = json.loads((tmp_path / "output/export/triptych.json").read_text())
    assert metadata["eval_perplexity"] is None
    assert_json(tmp_path / "output")


def test_a_ppo_step_all_of_whose_minibatches_are_refused(forks, tiny, tmp_path):
    """Its numbers are those of its rollout; the next step learns."""
    at = "step3_ppo.ppo_losses:PPOLosses._policy_sums"
    hooks = [{"at": at, "call": call, "do": "nan", "when": "after"} for call in range(5, 9)]
    done = forks.run(3, short_flags(tiny, 3, 0, output_dir=tmp_path / "output"), hooks=hooks)
    assert done.codes == [0], done.text()
    assert [step for step, _ in bad_steps(tmp_path / "output")] == [2, 2]
    rows = read_metrics(tmp_path / "output", "objective/score")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert ["policy/loss" in row for row in rows] == [True, False, True]
    assert_finite(tmp_path / "output")
