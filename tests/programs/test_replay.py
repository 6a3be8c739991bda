"""tools.replay names what a run did otherwise: planted causes, each at its step, phase and tensor.

A spoilt run is compared with a good one; some steps of spoilt runs are made again from their own checkpoints.
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_inputs
from tiny_inputs import step_flags

from common.runs.run_files import DIGESTS, RUN_FILE
from tools import replay

pytestmark = pytest.mark.slow

PPO = {"max_train_steps": 4, "save_interval": 2, "save_total_limit": 0, "num_warmup_steps": 0}
SFT = {"max_train_steps": 3, "save_interval": 0, "num_warmup_steps": 0}
FLIP = "{}.view(torch.int32).view(-1)[5] ^= 1 << 20"
PARAMETERS = "exec:import torch; p = dict(args[0].module.named_parameters()); "
ENGINE_STEP = "common.engine.engine_step"


def gradient(name: str, call: int, **more: Any) -> dict[str, Any]:
    """Flip a bit in a gradient before its norm is computed."""
    flip = FLIP.format(f"p['{name}'].grad")
    return {"at": f"{ENGINE_STEP}:gradient_norms", "call": call, "do": PARAMETERS + flip} | more


def after_step(code: str, step: int, **more: Any) -> dict[str, Any]:
    """Run code on the engine of the first model after a step."""
    code = f"exec:import torch; engine = next(iter(args[0].parts.values())).engine; {code}"
    return {"at": "common.runs.digest_log:DigestLog.write", "call": step, "do": code} | more


def before_scores(code: str, call: int) -> dict[str, Any]:
    """Run code on a rollout batch before it is scored."""
    return {"at": "step3_ppo.rollout:Rollout.score", "call": call, "do": f"exec:batch = args[1]; {code}"}


class Cause(NamedTuple):
    """A run that is spoilt, and what must be said of it."""

    step: int  # of the pipeline
    expected: str  # a pattern
    hook: dict[str, Any] | None = None
    flags: dict[str, Any] = {}  # of the good run, too
    other_flags: dict[str, Any] = {}  # of the spoilt one alone
    ranks: int = 1
    gpu: bool = False


Q_PROJ = "causal_lm.model.layers.1.self_attn.q_proj.weight"
HEAD = "classifier.score.weight"
WEIGHT = "p = dict(engine.module.named_parameters())['{}'].data; " + FLIP.format("p")
STATE = "s = engine.optimizer.state[dict(engine.module.named_parameters())['{}']]; " + FLIP.format(
    "s['exp_avg_sq']"
)
MASTER = "p = engine.optimizer.single_partition_of_fp32_groups[0].data; " + FLIP.format("p")
MASTER_3 = "p = engine.optimizer.fp32_partitioned_groups_flat[0].data; " + FLIP.format("p")
HALF = "p = dict(engine.module.named_parameters())['{}'].data; p.view(torch.int16).view(-1)[5] ^= 1 << 6"
CAUSES = {
    "a gradient of the actor": Cause(
        3, rf"step 2: policy/loss 1: gradients differs:\n  {Q_PROJ}: other bits", gradient(Q_PROJ, 3)
    ),
    "a gradient of the critic": Cause(
        3, rf"step 3: value/loss 1: gradients differs:\n  {HEAD}: other bits", gradient(HEAD, 6)
    ),
    "a gradient of an adapter": Cause(
        1,
        r"step 2: sft/loss 1: gradients differs:\n  .*layers.0.self_attn.v_proj.lora_B.default.weight: other",
        gradient("causal_lm.base_model.model.model.layers.0.self_attn.v_proj.lora_B.default.weight", 2),
        SFT | {"lora_dim": 4},
    ),
    "a gradient of one rank alone": Cause(
        1, rf"step 2: sft/loss 1: gradients differs:\n  rank 1, {Q_PROJ}: other bits",
        gradient(Q_PROJ, 2, rank=1), SFT, ranks=2,
    ),
    "a sum without an order": Cause(
        2, r"step 1: reward/loss 1: gradients differs:\n  .*embed_tokens.weight: other bits",
        {
            "at": f"{ENGINE_STEP}:gradient_norms",
            "do": PARAMETERS + "p['classifier.model.embed_tokens.weight'].grad.mul_(1 + 2e-7)",
        },
        SFT,
    ),
    "a weight after an update": Cause(
        3, rf"step 2: state of actor differs:\n  {Q_PROJ}:weight@0", after_step(WEIGHT.format(Q_PROJ), 2)
    ),
    "a moment of the optimizer": Cause(
        3, rf"step 2: state of actor differs:\n  {Q_PROJ}:exp_avg_sq@0: other",
        after_step(STATE.format(Q_PROJ), 2)
    ),
    "a master weight of stage 3": Cause(
        1, r"step 2: state of model differs:\n  rank 1, .*:weight@\d+: ",
        after_step(MASTER_3, 2, rank=1),
        SFT | {"zero_stage": 3}, ranks=2,
    ),
    "a master weight of stage 2": Cause(
        1, r"step 2: state of model differs:\n  rank 1, .*:weight@\d+: ", after_step(MASTER, 2, rank=1),
        SFT | {"zero_stage": 2}, ranks=2,
    ),
    "a 16-bit weight": Cause(
        1, rf"step 2: 16-bit weights of model differs:\n  {Q_PROJ}: other",
        after_step(HALF.format(Q_PROJ), 2),
        SFT | {"dtype": "bf16"},
    ),
    "the average": Cause(
        3, r"step 1: state of ema differs:\n  causal_lm.model.embed_tokens.weight@0: ",
        {
            "at": "step3_ppo.trainer_state:ExponentialMovingAverage.update", "when": "after",
            "do": "exec:import torch; a = next(iter(args[0].averages.values())); " + FLIP.format("a"),
        },
        PPO | {"ema_decay": 0.9},
    ),
    "the random state": Cause(
        3, r"step 2: state of random differs:\n  0:torch@0: ", after_step("torch.rand(1)", 2)
    ),
    "an update that is made twice": Cause(
        2, r"step 2: state of model differs:\n  .*embed_tokens.weight:weight@0: ",
        after_step("p = next(engine.module.parameters()); p.data.add_(1e-5)", 2), SFT,
    ),
    "a sampled token": Cause(
        3, r"step 2: rollout differs:\n  response_ids: ",
        before_scores("batch.data['response_ids'][1] ^= 1", 2)
    ),
    "a sampled log-probability": Cause(
        3, r"step 3: rollout differs:\n  rollout_logprobs: ",
        before_scores("batch.data['rollout_logprobs'][0] += 1e-6", 3),
    ),
    "two responses exchanged": Cause(
        3, r"step 2: rollout differs:\n  response_ids: other bits, the same total",
        before_scores("x = batch.data['response_ids']; x[:4] = x[:4].flip(0).clone()", 2),
    ),
    "a score": Cause(
        3, r"step 2: rollout differs:\n  scores: ",
        {
            "at": "step3_ppo.rollout:join_scores", "call": 2,
            "do": "exec:args[3]['scores'][0][0] += 1e-4",
        },
    ),
    "a reward that is no function of its input": Cause(
        3, r"step 1: rollout differs:\n  scores: ", flags=PPO | {"reward": "function:anything:anything"},
    ),
    "an advantage": Cause(
        3, r"step 3: advantages differs:\n  advantages: ",
        {
            "at": "step3_ppo.ppo_trainer:PPOTrainer._normalise_values", "call": 3,
            "do": "exec:args[1].data['advantages'][0] += 1e-4",
        },
    ),
    "a row of the data": Cause(
        1, r"step \d: sft/loss 1: rows of sft/loss differs:\n  input_ids: [\s\S]*data_key: ",
        flags=SFT | {"num_train_epochs": 1, "max_train_steps": None}, other_flags={"data_path": "CHANGED"},
    ),
    "a mask": Cause(
        1, r"step 2: sft/loss 1: rows of sft/loss differs:\n  loss_mask: ",
        {
            "at": "common.programs.single_model:compute_gradients", "call": 2,
            "do": "exec:m = args[1][0].micro_batches[0].data['loss_mask']; m[m.nonzero()[0]] = False",
        },
        SFT,
    ),
    "a seed": Cause(
        3, r"step 1: rollout differs:\n  prompt_ids: [\s\S]*besides:\n  --seed: 1234 against 5",
        other_flags={"seed": 5},
    ),
    "a flag of the rewards": Cause(
        3, r"step 2: advantages differs:\n  rewards: [\s\S]*besides:\n  --kl_coef: 0.1 against 0.2",
        other_flags={"kl_coef": 0.2},
    ),
    "a learning rate": Cause(
        2, r"step 1: state of model differs:\n  .*:weight@0: [\s\S]*--learning_rate: 1e-05 against 2e-05",
        flags=SFT | {"learning_rate": 1e-5}, other_flags={"learning_rate": 2e-5},
    ),
    "a gradient on a GPU": Cause(
        1, rf"step 2: sft/loss 1: gradients differs:\n  {Q_PROJ}: other bits", gradient(Q_PROJ, 2),
        SFT | {"deterministic": True, "dtype": "fp32"}, gpu=True,
    ),
}  # fmt: skip
REWARD = """
import random

def anything(prompts, responses, rows):
    return [random.SystemRandom().random() for _ in responses]
"""


@pytest.fixture(scope="module")
def run(forks, tiny, tmp_path_factory):
    """Make a run of a step with flags, once without a hook; return its folder."""
    folder = tmp_path_factory.mktemp("replay")
    rows = tiny_inputs.make_rows(50)
    rows[20]["chosen"] += " fine"
    paths = {"CHANGED": tiny_inputs.write_rows(folder / "changed.jsonl", rows)}
    (folder / "anything.py").write_text(REWARD)

    def make(cause: Cause, *, is_spoilt: bool) -> Path:
        output = folder / re.sub(r"\W+", "_", f"run{len(list(folder.iterdir()))}")
        flags = cause.flags or {1: SFT, 2: SFT, 3: PPO}[cause.step]
        flags = flags | (cause.other_flags if is_spoilt else {})
        flags = {name: paths.get(str(value), value) for name, value in flags.items()}
        hooks = [cause.hook] if is_spoilt and cause.hook else []
        options = {"gpu": {}} if cause.gpu else {"cwd": str(folder)}
        flags = step_flags(tiny, cause.step, output_dir=output, **flags)
        done = forks.run(cause.step, flags, ranks=cause.ranks, hooks=hooks, **options)
        assert done.codes == [0] * cause.ranks, done.text()[-3000:]
        return output

    goods: dict[str, Path] = {}

    def get(cause: Cause, *, is_spoilt: bool) -> Path:
        key = str((cause.step, cause.flags, cause.ranks, cause.gpu))
        if is_spoilt:
            return make(cause, is_spoilt=True)
        if key not in goods:
            goods[key] = make(cause, is_spoilt=False)
        return goods[key]

    return get


@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause_is_found_at_its_step_phase_and_tensor(name, run, capsys):
    cause = CAUSES[name]
    good, spoilt = run(cause, is_spoilt=False), run(cause, is_spoilt=True)
    assert replay.main([str(good), str(spoilt)]) == 1
    assert re.search(cause.expected, capsys.readouterr().out)


def folder_state(folder: Path) -> dict[str, tuple[float, int]]:
    return {str(f): (f.stat().st_mtime, f.stat().st_size) for f in sorted(folder.rglob("*"))}


def test_steps_are_made_again_and_nothing_changes_in_the_run(run, capfd):
    """On one rank to the bit, with a planted gradient named; with another stage within bounds."""
    spoilt = run(CAUSES["a gradient of the critic"], is_spoilt=True)
    before = folder_state(spoilt)
    assert replay.main([str(spoilt), "--step", "2"]) == 0
    assert "from the start on" in (text := capfd.readouterr().out)
    assert "equal bit for bit: steps 1 to 2, 22 phases" in text
    assert replay.main([str(spoilt), "--step", "3", "--until", "4"]) == 1
    text = capfd.readouterr().out
    assert "from step-000002 on" in text
    assert f"step 3: value/loss 1: gradients differs:\n  {HEAD}: other bits" in text
    assert replay.main([str(spoilt), "--step", "2", "--", "--actor_zero_stage", "2"]) == 0
    assert "equal within 0.0001: steps 1 to 2" in capfd.readouterr().out
    assert folder_state(spoilt) == before


def test_two_ranks_are_checked_on_two_and_on_one(run, capfd):
    whole = run(Cause(1, "", flags=SFT | {"zero_stage": 2, "save_interval": 2}, ranks=2), is_spoilt=False)
    assert replay.main([str(whole), "--step", "3"]) == 0
    assert "equal bit for bit: steps 3 to 3" in capfd.readouterr().out
    assert replay.main([str(whole), "--step", "3", "--num_ranks", "1"]) == 0
    assert "equal within 0.0001: steps 3 to 3" in capfd.readouterr().out
    with pytest.raises(SystemExit) as left:
        replay.main([str(whole), "--step", "3", "--num_ranks", "3"])
    text = capfd.readouterr().err
    values = "--gradient_accumulation_steps 1 --per_device_train_batch_size 4"
    assert left.value.code == 2 and f"{values} on 2 ranks cannot be divided among 3" in text


@pytest.mark.parametrize("flags", [SFT, PPO], ids=["SFT", "PPO"])
def test_one_rank_is_checked_on_two(run, capfd, flags):
    """Batches of one rank, of which there is one, are divided by their rows."""
    alone = run(Cause(1, "", flags=flags), is_spoilt=False)
    assert replay.main([str(alone), "--step", "3", "--num_ranks", "2"]) == 0
    assert "equal within 0.0001: steps" in (text := capfd.readouterr().out)
    assert "world_size: 1 against 2" in text


def test_rows_are_divided_among_ranks_by_hand():
    step_3 = {"gradient_accumulation_steps": 3, "per_device_training_batch_size": 8}
    step_3 |= {"generation_batches": 4, "per_device_generation_batch_size": 10}
    divide = replay.divide_rows
    assert divide(step_3, 2, 2) == {"gradient_accumulation_steps": 3, "generation_batches": 4}
    assert divide(step_3, 2, 1) == {"gradient_accumulation_steps": 6, "generation_batches": 8}
    assert divide(step_3, 1, 2) == {"per_device_training_batch_size": 4, "generation_batches": 2}
    assert divide({"gradient_accumulation_steps": 5, "per_device_train_batch_size": 4}, 3, 2) == {
        "per_device_train_batch_size": 6
    }


@pytest.mark.parametrize("call", [2, 4])
def test_a_step_that_was_stopped_in_the_middle_has_the_digests_of_a_whole_one(call, forks, tiny, tmp_path):
    flags = PPO | {"ppo_epochs": 2, "gradient_accumulation_steps": 1, "max_train_steps": 3}
    folders = tmp_path / "whole", tmp_path / "stopped"
    jobs = [step_flags(tiny, 3, output_dir=folder, **flags) for folder in folders]
    stop = {"at": "step3_ppo.ppo_losses:PPOLosses.update", "call": call, "do": "term"}
    assert forks.run(3, jobs[0]).code == 0
    assert forks.run(3, jobs[1], hooks=[stop]).code == 75
    assert forks.run(3, jobs[1]).code == 0
    whole, stopped = map(replay.read_digests, folders)
    assert list(whole) == list(stopped) == [1, 2, 3]
    assert [list(ranks[0]) for ranks in whole.values()] == [list(ranks[0]) for ranks in stopped.values()]
    assert whole == stopped and "policy/loss 2: gradients" in whole[2][0]


def test_a_checkpoint_that_changed_on_its_way_is_found(forks, tiny, tmp_path, capsys):
    flags = step_flags(tiny, 1, **SFT | {"save_interval": 2, "max_train_steps": 4})
    folders = [tmp_path / name for name in ("good", "spoilt")]
    flip = {
        "at": "common.runs.saved_state:EngineState.load", "when": "after",
        "do": "exec:import torch; p = list(args[0].engine.module.parameters())[-1].data; " + FLIP.format("p"),
    }  # fmt: skip
    kill = {"at": "common.programs.single_model:Trainer.train_step", "call": 4, "do": "kill"}
    for folder, hooks in zip(folders, ([], [flip]), strict=True):
        own = flags | {"output_dir": folder}
        assert forks.run(1, own, hooks=[kill]).code == -9
        assert forks.run(1, own, hooks=hooks).code == 0
    assert replay.main([*map(str, folders)]) == 1
    assert "step 3: sft/loss 1: losses differs" in capsys.readouterr().out


def test_an_interval_of_digests(forks, tiny, tmp_path):
    for interval, steps in ((2, [2, 4]), (0, [])):
        output = tmp_path / str(interval)
        flags = SFT | {"max_train_steps": 5, "digest_interval": interval, "output_dir": output}
        assert forks.run(1, step_flags(tiny, 1, **flags)).code == 0
        assert (output / DIGESTS).exists() == bool(steps)
        assert not steps or list(replay.read_digests(output)) == steps


def test_another_library_is_named_though_the_numbers_are_equal(run, tmp_path, capsys):
    cause = Cause(1, "", flags=SFT)
    first, second = run(cause, is_spoilt=False), run(cause, is_spoilt=True)
    about = json.loads((second / RUN_FILE).read_text())
    about["starts"][-1]["versions"]["torch"] = "2.99.0"
    (second / RUN_FILE).write_text(json.dumps(about))
    assert replay.main([str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert "equal bit for bit: steps 1 to 3, 15 phases" in text
    assert re.search(r"besides:\n  torch: 2\.\S+ against 2\.99\.0\n$", text)


def test_bad_input_is_named(run, tmp_path, capsys):
    good = run(Cause(1, "", flags=SFT), is_spoilt=False)
    whole = (good / DIGESTS).read_bytes()
    lines = gzip.decompress(whole)
    damaged, flipped, empty, moved = (tmp_path / name for name in ("damaged", "flipped", "empty", "moved"))
    at_9 = lines.replace(b'"step": 1', b'"step": 9').splitlines()[0]
    contents = {damaged: gzip.compress(b"{\n" + lines), empty: b"", moved: gzip.compress(at_9)}
    for folder, content in (contents | {flipped: whole[:60] + b"?" + whole[61:]}).items():
        folder.mkdir()
        (folder / DIGESTS).write_bytes(content)
    (tmp_path / "digests.jsonl").touch()
    cases = {
        (tmp_path, "--step", "1"): "--digest_interval is 0; an earlier version's digests.jsonl is not read",
        (damaged, good): f"{DIGESTS}, line 1 is damaged",
        (flipped, good): DIGESTS,
        (empty, good): f"{DIGESTS} has no step yet",
        (moved, good): "have recorded no step in common",
        (good, "--step", "9"): f"step 9 is not in {good}/{DIGESTS}, which has 1 to 3",
        (good, "--step", "1", "--", "--model_name_or_path", "nothing"): "--model_name_or_path nothing",
    }
    cases |= {
        (good,): "give either two runs, or one and --step",
        (good, good, "--step", "1"): "give either two runs, or one and --step",
        (good, "--step", "3", "--until", "2"): "--until 2 is before --step 3",
    }
    for words, message in cases.items():
        with pytest.raises(SystemExit) as left:
            replay.main([str(word) for word in words])
        assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_line_that_is_torn_is_left_out(run, tmp_path):
    good = run(Cause(1, "", flags=SFT), is_spoilt=False)
    (tmp_path / DIGESTS).write_bytes((good / DIGESTS).read_bytes()[:-30])
    whole = replay.read_digests(good)
    assert replay.read_digests(tmp_path) == {step: whole[step] for step in (1, 2)}
