"""A run that was stopped and resumed ends bit for bit where one that was never stopped does.

Weights, optimizer states, averages, random numbers and counters are compared in the last checkpoint of both
runs, metrics and samples in their files, exports byte by byte.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_inputs
import torch
from program_runs import read_metrics
from safetensors.torch import load_file
from tiny_inputs import from_words, step_flags

from common.runs.checkpoints import find_checkpoints
from common.runs.run_files import STOPPED
from export import main as run_export

pytestmark = pytest.mark.slow

KILLED = -9
TRAIN_STEP = "step1_sft.sft_trainer:SFTTrainer.train_step"
# Seconds, rates and bytes of memory differ from process to process.
# What a clock says; and the bytes of a switch: which small weights ZeRO 3 keeps gathered is not saved.
TIMES = ("seconds", "perf/", "hybrid/received_gib")


SHARED = "--save_interval 1 --eval_fraction 0.2 --eval_interval 2 --gradient_accumulation_steps 2 "
SINGLE = SHARED + (
    "--data_split 4,4,2 --max_seq_len 64 --per_device_train_batch_size 2 --max_train_steps 5 "
    "--num_train_epochs 9"
)
PPO = SHARED + (
    "--data_split 1,1,8 --per_device_generation_batch_size 4 --generation_batches 2 --ppo_epochs 2 "
    "--per_device_training_batch_size 2 --max_prompt_seq_len 32 --max_answer_seq_len 8 --num_warmup_steps 2 "
    "--actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --max_train_steps 3 --enable_hybrid_engine true "
    "--enable_ema true --ema_decay 0.5 --kl_target 0.1 --value_norm exp "
    "--keep_best eval/score --save_rollouts 1"
)


@pytest.fixture(scope="module")
def flags(tiny, tiny_tokenizer, tmp_path_factory):
    return short_runs(tiny, tiny_tokenizer, tmp_path_factory.mktemp("a"))


def short_runs(tiny: Any, tokenizer: Any, folder: Path) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """Step, ranks and flags of short runs, by the name of their variant."""
    single = step_flags(tiny, 1, model_name_or_path=tiny.gpt2, **from_words(SINGLE))  # it has dropout
    ppo = step_flags(tiny, 3, **from_words(PPO))
    two = ppo | {"generation_batches": 1, "per_device_training_batch_size": 1, "inference_tp_size": 2}
    zero_3 = {"actor_zero_stage": 3, "critic_zero_stage": 3, "ref_ema_decay": 0.7}
    zero_2 = {"actor_zero_stage": 2, "critic_zero_stage": 2, "dtype": "bf16", "offload": "optimizer"}
    adapter = tiny_inputs.save_random_adapter(folder / "a", tiny.base, tokenizer)
    adapted = {"actor_model_name_or_path": adapter, "critic_model_name_or_path": tiny.base, "packed": True}
    adapted |= {"reward": f"model:{tiny.reward}", "critic_lora_dim": 4}  # actor and critic share their base
    mixed = {"unsupervised_dataset_name": tiny.text, "max_prompt_seq_len": 24}
    by_text = mixed | {"unsup_step": "own"}
    mixed |= {"num_samples_per_prompt": 2, "per_device_generation_batch_size": 2, "ref_ema_decay": 0.7}
    muon = {"zero_stage": 3, "per_device_train_batch_size": 1, "dtype": "bf16", "optimizer_dtype": "bf16"}
    muon |= {"optimizer": "muon", "muon_learning_rate": 1e-3}
    experts = {"model_name_or_path": tiny.mixtral, "lora_dim": 4, "lora_module_name": ".", "zero_stage": 3}
    experts |= {"per_device_train_batch_size": 1, "dropout": 0.0, "gradient_checkpointing": True}
    in_4_bits = {"lora_dim": 4, "load_in_4bit": True, "model_name_or_path": tiny.base}
    scale = folder / "scale.json"
    scale.write_text(json.dumps({"fp16": {"initial_scale_power": 4, "loss_scale_window": 2}}))
    # Without rewards there are none of their numbers in the state.
    taught = {
        name: value for name, value in ppo.items() if name not in ("critic_model_name_or_path", "keep_best")
    }
    taught |= {"algorithm": "distill", "teacher_model_name_or_path": tiny.gpt2}
    return {
        "sft": (1, 1, single | {"dropout": 0.1}),
        "sft, two ranks, ZeRO 2": (1, 2, single | {"zero_stage": 2, "per_device_train_batch_size": 1}),
        "sft, two ranks, ZeRO 3, Muon in bf16": (1, 2, single | muon),
        "sft, LoRA, bf16": (1, 1, single | {"lora_dim": 4, "dtype": "bf16", "packed": True}),
        "sft, LoRA of experts, two ranks, ZeRO 3": (1, 2, single | experts),
        "sft, LoRA, 4 bits": (1, 1, single | in_4_bits),
        # Its loss scale grows at every second step.
        "sft, fp16": (1, 1, single | {"dtype": "fp16", "ds_config": scale}),
        "reward": (2, 1, single),
        "dpo": (2, 1, single | {"loss": "dpo", "per_device_eval_batch_size": 2}),
        "dpo, two ranks": (
            2,
            2,
            single | {"loss": "dpo", "per_device_train_batch_size": 1, "per_device_eval_batch_size": 2},
        ),
        "kto": (2, 1, single | {"loss": "kto"}),
        "reward, two ranks, ZeRO 3": (2, 2, single | {"zero_stage": 3, "per_device_train_batch_size": 1}),
        "ppo": (3, 1, ppo | mixed),
        "ppo, stale": (3, 1, ppo | by_text | {"rollout_staleness": 1, "rollout_correction": "seq_tis"}),
        "ppo, LoRA": (3, 1, ppo | adapted),
        "distill, LoRA": (3, 1, taught | {"actor_lora_dim": 4}),
        "ppo, two ranks, ZeRO 3": (3, 2, two | zero_3),
        "ppo, two ranks, ZeRO 2, bf16": (3, 2, two | zero_2),
        "ppo, two replicas": (3, 2, two | zero_2 | {"inference_tp_size": 1}),
    }


@pytest.fixture(scope="module")
def finished(forks, flags, tmp_path_factory):
    """Return the folder of the run that was never stopped."""

    @functools.cache
    def make(variant: str) -> Path:
        step, ranks, values = flags[variant]
        folder = tmp_path_factory.mktemp("finished") / "output"
        done = forks.run(step, values | {"output_dir": folder}, ranks=ranks)
        assert done.codes == [0] * ranks, done.text()
        return folder

    return make


def last_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the numbers of the last checkpoint of a run."""
    found, damages = find_checkpoints(folder)
    assert found and not damages
    tensors = {
        f"{file.name}:{name}": tensor
        for file in sorted(found[0].folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    numbers = json.loads(json.dumps(found[0].meta["numbers"]))
    del numbers["log"]  # sizes of files and seconds
    return tensors, numbers


class OnGpu:
    """Runs whose ranks have a pretended GPU each."""

    def __init__(self, forks: Any) -> None:
        self.run = functools.partial(forks.run, gpu={})


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of metrics without what a clock says."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def assert_same_run(resumed: Path, whole: Path) -> None:
    """Fail where two runs ended differently by as much as a bit."""
    mine, expected = last_state(resumed), last_state(whole)
    assert mine[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        # To the bit; a row that the reference was not asked about has NaN.
        torch.testing.assert_close(mine[0][name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    assert mine[1] == expected[1]
    assert without_times(read_metrics(resumed)) == without_times(read_metrics(whole))
    for name in ("samples.jsonl", "rollouts.jsonl.gz"):
        if (whole / name).exists():
            assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    for export in whole.glob("export*"):
        for file in export.iterdir():
            assert (resumed / export.name / file.name).read_bytes() == file.read_bytes(), file
    assert not [p for p in resumed.rglob("*") if p.suffix in (".writing", ".deleting")]


def stop_and_resume(forks, variant: tuple, folder: Path, hook: dict[str, Any], **more: Any) -> None:
    """Run until the hook strikes, then again until the end."""
    step, ranks, values = variant
    values = values | {"output_dir": folder} | more
    first = forks.run(step, values, ranks=ranks, hooks=[hook])
    expected = {"kill": KILLED, "term": STOPPED, "int": STOPPED}[hook["do"]]
    # Of two ranks the one that is not killed ends too, for its neighbour is gone.
    assert first.codes[hook.get("rank", 0)] == expected and 0 not in first.codes, first.text()
    again = forks.run(step, values, ranks=ranks)
    assert again.codes == [0] * ranks, again.text()


SINGLE_POINTS = {
    "between two accumulation steps": ("step1_sft.sft_trainer:compute_nll_sum", 8),
    "in DeepSpeed's step": ("deepspeed.runtime.engine:DeepSpeedEngine.step", 5),
    "in an evaluation": ("step1_sft.sft_trainer:SFTTrainer.evaluate", 2),
    "writing a rank's file": ("common.runs.checkpoints:write_slices", 5),
    "before the commit": ("common.runs.checkpoints:publish_folder", 2),
    "removing an old checkpoint": ("common.runs.checkpoints:remove_folder", 1),
    "in the export": ("common.runs.export:_write_model", 1),
}


@pytest.mark.parametrize("point", SINGLE_POINTS)
def test_sft_killed(forks, flags, finished, tmp_path, point):
    """Wherever step 1 is killed, it ends where it would have."""
    at, call = SINGLE_POINTS[point]
    stop_and_resume(forks, flags["sft"], tmp_path / "output", {"at": at, "call": call, "do": "kill"})
    assert_same_run(tmp_path / "output", finished("sft"))


VARIANTS = [("sft, two ranks, ZeRO 2", "kill"), ("sft, LoRA, bf16", "term")]
VARIANTS += [("sft, LoRA, 4 bits", "kill")]
VARIANTS += [("sft, LoRA of experts, two ranks, ZeRO 3", "term")]
VARIANTS += [("sft, two ranks, ZeRO 3, Muon in bf16", "kill")]
VARIANTS += [("reward, two ranks, ZeRO 3", "term"), ("dpo", "kill"), ("kto", "kill")]


@pytest.mark.parametrize(("variant", "do"), VARIANTS)
def test_single_model_variants(forks, flags, finished, tmp_path, variant, do):
    """Killed or asked to stop in the middle of an optimizer step."""
    hook = {"at": "common.engine.engine_step:gradient_norms", "call": 4, "do": do}
    stop_and_resume(forks, flags[variant], tmp_path / "output", hook)
    assert_same_run(tmp_path / "output", finished(variant))


@pytest.mark.parametrize(
    "variant", ["sft", "sft, fp16", "sft, two ranks, ZeRO 2", "ppo, two ranks, ZeRO 2, bf16"]
)
def test_on_a_pretended_gpu(forks, flags, tmp_path, variant):
    """Its offloaded optimizer, its average and its random numbers come back to where they were."""
    step, ranks, values = flags[variant]
    done = OnGpu(forks).run(step, values | {"output_dir": tmp_path / "whole"}, ranks=ranks)
    assert done.codes == [0] * ranks, done.text()
    hook = {"at": "common.engine.engine_step:gradient_norms", "call": 4, "do": "term"}
    stop_and_resume(OnGpu(forks), flags[variant], tmp_path / "output", hook)
    assert_same_run(tmp_path / "output", tmp_path / "whole")


PPO_POINTS = {
    "before the first step": ("step3_ppo.evaluation:Evaluation.evaluate", 1),
    "in an evaluation": ("step3_ppo.evaluation:measure", 2),
    "in the export of the best": ("common.runs.export:_write_model", 1),
    "generation": ("step3_ppo.roles:Actor.generate", 8),
    "between two accumulation steps": ("step3_ppo.ppo_losses:PPOLosses._policy_sums", 12),
    "between two minibatches": ("step3_ppo.ppo_trainer:PPOTrainer.update", 7),
    "in the log": ("common.runs.run_logger:RunLogger.log", 2),
    "in the export of the average": ("common.runs.export:_write_model", 3),
}
ASKED_TO_STOP = ("before the first step", "generation", "between two minibatches")
KILLED_OR_ASKED = [*(("kill", point) for point in PPO_POINTS), *(("term", point) for point in ASKED_TO_STOP)]


@pytest.mark.parametrize(("do", "point"), KILLED_OR_ASKED)
def test_ppo_stopped(forks, flags, finished, tmp_path, point, do):
    """Killed, it makes the step again; asked to stop, it saves after the next rollout or minibatch."""
    at, call = PPO_POINTS[point]
    more = {"save_interval": 100} if do == "term" else {}
    stop_and_resume(forks, flags["ppo"], tmp_path / "output", {"at": at, "call": call, "do": do}, **more)
    assert_same_run(tmp_path / "output", finished("ppo"))


@pytest.mark.parametrize(
    "variant",
    ["ppo, stale", "ppo, LoRA", "distill, LoRA", "ppo, two ranks, ZeRO 3", "ppo, two ranks, ZeRO 2, bf16"],
)
def test_ppo_variants(forks, flags, finished, tmp_path, variant):
    """Rollouts that wait, adapters, shards."""
    hook = {"at": PPO_POINTS["between two accumulation steps"][0], "call": 5, "do": "term"}
    stop_and_resume(forks, flags[variant], tmp_path / "output", hook)
    assert_same_run(tmp_path / "output", finished(variant))


# Variant, call at which the request comes, last checkpoint, evaluated steps in it.
PASSES = {
    "the reference": ("dpo", "step2_reward.pair_trainer:DPOTrainer.compute_logprobs", 3, 0, []),
    "the reference, two ranks": (
        "dpo, two ranks", "step2_reward.pair_trainer:DPOTrainer.compute_logprobs", 2, 0, [],
    ),
    "the first evaluation": ("sft", "step1_sft.sft_trainer:SFTTrainer.evaluate", 1, 0, []),
    "an evaluation": ("sft", "step1_sft.sft_trainer:SFTTrainer.evaluate", 2, 2, [0]),
    "an evaluation, two ranks": (
        "reward, two ranks, ZeRO 3", "step2_reward.pair_trainer:evaluate_pairs", 2, 2, [0],
    ),
    "the last evaluation": ("sft", "step1_sft.sft_trainer:SFTTrainer.evaluate", 4, 5, [0, 2, 4]),
    "the export": ("sft", "common.runs.export:gather_state_dict", 1, 5, [0, 2, 4, 5]),
    "an evaluation of step 3": ("ppo", "step3_ppo.evaluation:Evaluation._sample", 2, 2, [0]),
    "a rollout": ("ppo", "step3_ppo.rollout:Rollout.collect", 2, 1, [0]),
    "a token of a rollout": ("ppo", "common.generation.decode:DecodeStep.run", 40, 1, [0]),
    "a token of a rollout, two ranks": (
        "ppo, two ranks, ZeRO 3", "common.generation.decode:DecodeStep.run", 19, 1, [0],
    ),
    "a token of one of two ranks": (
        "ppo, two replicas", "common.generation.decode:DecodeStep.run", 19, 1, [0],
    ),
    "a rollout that waits": ("ppo, stale", "step3_ppo.rollout:Rollout.collect", 2, 0, [0]),
    "a rollout of two ranks": ("ppo, two ranks, ZeRO 3", "step3_ppo.rollout:Rollout.score", 3, 1, [0]),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_ends_at_once(forks, flags, finished, tmp_path, name):
    """One rank is asked; all end before their next micro-batch, and the rerun makes the pass to its end."""
    variant, at, call, step, evaluated = PASSES[name]
    stage, ranks, values = flags[variant]
    values = values | {"output_dir": tmp_path / "output"}
    hook = {"at": at, "call": call, "do": "term", "rank": ranks - 1}
    first = forks.run(stage, values, ranks=ranks, hooks=[hook])
    assert first.codes == [STOPPED] * ranks, first.text()
    found, _ = find_checkpoints(tmp_path / "output")
    assert found[0].folder.name == f"step-{step:06d}"
    assert f"stopped after step-{step:06d}, saved in " in first.text()
    rows = read_metrics(tmp_path / "output")
    assert [
        row["step"] for row in rows if any(key.endswith(("eval_loss", "eval/kl")) for key in row)
    ] == evaluated
    assert [row["step"] for row in rows if "perf/step_seconds" in row] == list(range(1, step + 1))
    if "reference" in name:
        (file,) = found[0].files("reference")
        (logprobs,) = (x for name, x in load_file(file).items() if name.startswith("train"))
        is_known = ~logprobs.view(-1, 2).isnan().any(1)
        assert int(is_known.sum()) == call * 2 * ranks, "after each pass the next one sees the request"
    again = forks.run(stage, values, ranks=ranks)
    assert again.codes == [0] * ranks, again.text()
    assert_same_run(tmp_path / "output", finished(variant))


@pytest.mark.parametrize("variant", ["dpo", "kto"])
def test_a_resumed_run_makes_no_pass_of_its_reference_again(forks, flags, finished, tmp_path, variant):
    """Its log-probabilities come from the checkpoint: the run would be killed at the first of such a pass."""
    stage, ranks, values = flags[variant]
    values = values | {"output_dir": tmp_path / "output"}
    reference = "step2_reward.reference:compute_reference"
    killed = forks.run(stage, values, ranks=ranks, hooks=[{"at": reference, "call": 1, "do": "kill"}])
    assert killed.codes == [KILLED], "a new run makes it"
    term = {"at": "common.programs.single_model:Trainer.train_step", "call": 3, "do": "term"}
    first = forks.run(stage, values, ranks=ranks, hooks=[term])
    assert first.codes == [STOPPED], first.text()
    again = forks.run(stage, values, ranks=ranks, hooks=[{"at": reference, "call": 1, "do": "kill"}])
    assert again.codes == [0] and "resumes from" in again.text(), again.text()
    assert_same_run(tmp_path / "output", finished(variant))


def test_saved_by_the_clock_of_the_first_rank(forks, flags, finished, tmp_path):
    """Another one that runs ahead makes no rank wait for one that does not save; and it resumes as any."""
    step, ranks, values = flags["sft, two ranks, ZeRO 2"]
    values = values | {"output_dir": tmp_path / "output", "save_interval": "30m", "save_total_limit": 0}
    ticks = "exec:import itertools, types; from common.runs import run; run.time = types.SimpleNamespace("
    ticks += "monotonic=itertools.count(step={}).__next__)"
    hooks = [
        {"at": "common.runs.run:IntervalClock.__init__", "rank": rank, "do": ticks.format(seconds)}
        for rank, seconds in enumerate((1000, 10**6))
    ]
    hooks.append({"at": "step1_sft.sft_trainer:SFTTrainer.train_step", "call": 4, "do": "kill"})
    first = forks.run(step, values, ranks=ranks, hooks=hooks, seconds=60)
    assert first.codes[0] == KILLED, first.text()
    found, _ = find_checkpoints(tmp_path / "output")
    assert [checkpoint.folder.name for checkpoint in found] == ["step-000003", "step-000001"]
    again = forks.run(step, values, ranks=ranks)
    assert again.codes == [0] * ranks and "resumes from" in again.text(), again.text()
    assert_same_run(tmp_path / "output", finished("sft, two ranks, ZeRO 2"))


EXPORTED = ["sft, LoRA, bf16", "reward, two ranks, ZeRO 3", "ppo, two ranks, ZeRO 3", "ppo, LoRA"]
EXPORTED += ["sft, LoRA of experts, two ranks, ZeRO 3"]


@pytest.mark.parametrize("variant", EXPORTED)
def test_an_export_of_a_checkpoint_is_that_of_the_run(forks, finished, tmp_path, variant):
    """On one process, whatever the run had, from the last checkpoint: all that the run has exported."""
    folder = finished(variant)
    names = {"export": "model", "export_ema": "ema", "adapter": "adapter"}
    found = [name for name in names if (folder / name).exists()]
    assert len(found) == 1 + ("LoRA" in variant) + variant.startswith("ppo")
    for name in found:
        run_export([str(folder), "--output", str(tmp_path / name), "--what", names[name]])
        files = sorted(path.name for path in (folder / name).iterdir())
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == files
        for file in files:
            assert (tmp_path / name / file).read_bytes() == (folder / name / file).read_bytes(), file


def test_a_checkpoint_that_cannot_be_exported_is_told_in_one_message(finished, tmp_path, capsys):
    checkpoint = find_checkpoints(finished("sft, LoRA, bf16"))[0][0].folder
    shutil.copytree(checkpoint, tmp_path / "damaged")
    file = tmp_path / "damaged/model-rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    cases = [
        ([tmp_path / "damaged"], "model-rank-00000.safetensors has changed since it was written"),
        ([tmp_path / "nowhere"], "nowhere: it has no checkpoint"),
        ([checkpoint, "--what", "ema"], "--what ema: "),
    ]
    for (place, *more), said in cases:
        with pytest.raises(SystemExit) as left:
            run_export([str(place), "--output", str(tmp_path / "new"), *more])
        assert left.value.code == 2 and said in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 3)])
def test_other_ranks_and_stages(forks, flags, finished, tmp_path, ranks, stage):
    """What one rank saved without ZeRO is resumed with others, equal up to the order of sums."""
    step, _, values = flags["reward"]
    folder = tmp_path / "output"
    values = values | {"output_dir": folder}
    hook = {"at": "step2_reward.pair_trainer:RewardTrainer.train_step", "call": 4, "do": "kill"}
    assert forks.run(step, values, hooks=[hook]).code == KILLED
    more = {"zero_stage": stage, "per_device_train_batch_size": 2 // ranks}
    again = forks.run(step, values | more, ranks=ranks)
    assert again.codes == [0] * ranks, again.text()
    mine, expected = (load_file(f / "export" / "model.safetensors") for f in (folder, finished("reward")))
    assert max(float((mine[n] - expected[n]).abs().max()) for n in expected) < 1e-5
    losses = [
        [row["reward/loss"] for row in read_metrics(f, "reward/loss")] for f in (folder, finished("reward"))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
