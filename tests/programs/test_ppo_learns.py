"""Every part of step 3 does what it is for, shown on runs of a few seconds."""

import math

import pytest
import tiny_inputs
from program_runs import largest_difference, read_curve, read_metrics, read_weights, run_here
from tiny_inputs import step_flags

from common.ranks.failures import TooManyBadSteps
from common.runs.checkpoints import find_checkpoints
from common.runs.saved_state import TensorReader
from step3_ppo.ppo_trainer import PPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lone_process", "no_pictures")]

NUM_PROMPTS = 32


@pytest.fixture(scope="module")
def lover(tiny, tiny_tokenizer):
    """A reward model that loves tokens with an even id."""
    return tiny_inputs.save_token_lover(tiny.folder / "lover", tiny_tokenizer)


@pytest.fixture(scope="module")
def ppo(tiny, tmp_path_factory, lone_process, no_pictures):
    """Run step 3 with changed flags and return its output folder."""

    def start(**changes):
        output = tmp_path_factory.mktemp("ppo") / "output"
        flags = {"data_split": "0,0,1", "output_dir": output, "dtype": "fp32", "num_train_epochs": 1000}
        flags |= {"lr_scheduler_type": "constant", "num_warmup_steps": 0, "max_train_steps": 2}
        flags |= dict.fromkeys(("actor_learning_rate", "critic_learning_rate"), 3e-3)
        batches = ("per_device_generation_batch_size", "per_device_training_batch_size")
        flags = step_flags(tiny, 3, **flags | dict.fromkeys(batches, NUM_PROMPTS))
        run_here(3, flags | changes)
        return output

    return start


@pytest.fixture(scope="module")
def one_step(ppo):
    """One PPO step with a single update of all its samples."""
    return ppo(max_train_steps=1, reward_clip=0)


def test_an_optimizer_step_takes_several_generated_batches(ppo, capfd):
    """As in DeepSpeed-Chat, where --gradient_accumulation_steps goes on over them."""
    size = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
    by_accumulation = ppo(**size, gradient_accumulation_steps=6, generation_batches=2)
    assert "= 24 samples: a PPO step generates 6 batches" in capfd.readouterr().err
    by_batches = ppo(**size, gradient_accumulation_steps=6, generation_batches=6)
    assert "PPO step generates" not in capfd.readouterr().err
    for name in ("policy/loss", "value/grad_norm", "objective/score", "rollout/response_tokens"):
        curve = read_curve(by_accumulation, name)
        assert curve == read_curve(by_batches, name) and len(curve) == 2, name


# ---- before anything is learned, everything agrees


def test_policy_sampler_and_reference_begin_alike(one_step, ppo):
    (row,) = read_metrics(one_step)
    assert row["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert row["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6) and row["policy/clip_fraction"] == 0
    assert row["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    # No score is clipped here.
    assert row["objective/reward"] == pytest.approx(row["objective/score"], abs=1e-4)
    (other,) = read_metrics(ppo(max_train_steps=1, temperature=0.7, pad_vocab_multiple=64))
    for gaps in (row, other):  # the sampler's and the training pass's
        assert gaps["policy/logprob_gap"] < 1e-5


def test_gradient_checkpointing_gives_the_same_losses(ppo):
    plain = ppo()
    saving = ppo(actor_gradient_checkpointing=True, critic_gradient_checkpointing=True)
    for name in ("policy/loss", "value/loss", "policy/grad_norm", "value/grad_norm", "objective/score"):
        assert read_curve(saving, name) == pytest.approx(read_curve(plain, name), abs=1e-5), name


@pytest.mark.parametrize(("step", "name", "lora"), [(1, "sft/loss", {}), (2, "reward/loss", {"lora_dim": 4})])
def test_gradient_checkpointing_in_the_other_steps(tiny, tmp_path, step, name, lora):
    curves = []
    for is_on in (False, True):
        output = tmp_path / str(is_on)
        more = lora | {"output_dir": output, "max_train_steps": 2, "learning_rate": 1e-3}
        flags = step_flags(tiny, step, gradient_checkpointing=is_on or None, **more)
        run_here(step, flags)
        curves.append(read_curve(output, name))
    assert len(curves[0]) == 2 and curves[0] == pytest.approx(curves[1], abs=1e-5)


# ---- learning


@pytest.fixture(scope="module")
def long_runs(ppo, lover):
    """Return {kl_coef: output} of three runs towards tokens with an even id."""
    flags = {
        "critic_model_name_or_path": lover,
        "max_train_steps": 24,
        "ppo_epochs": 2,
        "actor_learning_rate": 1e-2,
    }
    return {coef: ppo(kl_coef=coef, **flags) for coef in (0.0, 0.5, 2.0)}


def test_the_score_rises(long_runs):
    scores = read_curve(long_runs[0.0], "objective/score")
    before, after = sum(scores[:3]) / 3, sum(scores[-3:]) / 3
    assert after > before + 2.0, scores  # the score of a text lies between -4.9 and 4.9


def test_a_larger_kl_coef_keeps_it_closer(long_runs):
    kl = {coef: sum(read_curve(output, "objective/kl")[-5:]) / 5 for coef, output in long_runs.items()}
    assert kl[0.0] > 2 * kl[0.5] and kl[0.5] > 1.2 * kl[2.0] > 0, kl


def test_the_critic_learns_what_a_policy_that_stays_earns(ppo, lover):
    output = ppo(actor_learning_rate=0.0, critic_model_name_or_path=lover, max_train_steps=12, ppo_epochs=2)
    assert read_curve(output, "objective/kl") == pytest.approx([0.0] * 12, abs=1e-5)
    explained = read_curve(output, "value/explained_variance")
    assert sum(explained[-3:]) / 3 > sum(explained[:3]) / 3 + 0.3, explained


def test_the_unsupervised_loss_falls_only_when_it_has_weight(ppo, tiny):
    outputs, curves = {}, {}
    for weight in (0.0, 5.0):
        flags = {"unsupervised_dataset_name": tiny.text, "unsup_coef": weight, "max_train_steps": 12}
        outputs[weight] = ppo(actor_learning_rate=1e-3, **flags)
        curves[weight] = read_curve(outputs[weight], "policy/unsup_loss")
    assert curves[0.0][0] == pytest.approx(curves[5.0][0], abs=1e-5)  # the same text under the same weights
    assert curves[5.0][-1] < curves[5.0][0] - 0.3, curves
    assert curves[0.0][-1] > curves[0.0][0] - 0.1, curves
    norms = [read_curve(output, "policy/grad_norm")[0] for output in (ppo(max_train_steps=1), outputs[0.0])]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), "the weight is not the policy's own"


@pytest.mark.parametrize("unsup_step", ["joint", "own"])
def test_the_score_rises_beside_unsupervised_text(ppo, lover, tiny, unsup_step):
    """As much as without, and the text is learned too."""
    text = {"unsupervised_dataset_name": tiny.text, "unsup_coef": 0.5, "unsup_step": unsup_step}
    flags = {"critic_model_name_or_path": lover, "max_train_steps": 24, "ppo_epochs": 2, "kl_coef": 0.0}
    output = ppo(actor_learning_rate=1e-2, **flags, **text)
    scores = read_curve(output, "objective/score")
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 2.0, scores
    losses = read_curve(output, "policy/unsup_loss")
    assert losses[-1] < losses[0] - 0.3, losses


def test_steps_on_text_are_steps_of_the_schedule(ppo, tiny):
    """Two PPO steps of two updates, each followed by one on text: a linear schedule of eight."""
    text = {"unsupervised_dataset_name": tiny.text, "unsup_step": "own"}
    output = ppo(**text, lr_scheduler_type="linear", actor_learning_rate=4e-3, ppo_epochs=2)
    assert read_curve(output, "policy/learning_rate") == pytest.approx([3.5e-3, 1.5e-3])
    assert read_curve(output, "unsup/learning_rate") == pytest.approx([3e-3, 1e-3])
    assert all(norm > 0 for norm in read_curve(output, "unsup/grad_norm"))


def test_ema_is_the_average_of_the_weights_after_each_update(ppo, tiny):
    """Of each optimizer step, two in one PPO step here."""
    decay, updates = 0.6, {"max_train_steps": 1, "ppo_epochs": 2}
    initial, first = read_weights(tiny.base), read_weights(ppo(max_train_steps=1) / "export")
    output = ppo(enable_ema=True, ema_decay=decay, **updates)
    second, average = read_weights(output / "export"), read_weights(output / "export_ema")
    assert largest_difference(first, initial) > 1e-3 and largest_difference(first, second) > 1e-3
    by_hand = {
        name: decay * (decay * initial[name] + (1 - decay) * first[name]) + (1 - decay) * second[name]
        for name in initial
    }
    assert largest_difference(average, by_hand) < 1e-6


def test_a_moving_reference_moves_once_a_step(ppo, monkeypatch):
    """Of two updates; then too it is d of what it was and 1 - d of what the actor is."""
    decay, train_step, moved = 0.6, PPOTrainer.train_step, []

    def look(trainer, *args):
        average = trainer.ref_average
        before = {name: x.clone() for name, x in average.averages.items()}
        numbers = train_step(trainer, *args)
        weights = {name: p.detach().flatten() for name, p in average.parameters.items()}
        by_hand = {name: decay * before[name] + (1 - decay) * weights[name] for name in before}
        assert largest_difference(average.averages, by_hand) < 1e-6
        moved.append(largest_difference(weights, before))
        return numbers

    monkeypatch.setattr(PPOTrainer, "train_step", look)
    ppo(ref_ema_decay=decay, ppo_epochs=2)
    assert len(moved) == 2 and min(moved) > 1e-3


def test_entropy_bonus_keeps_entropy(ppo, lover):
    flags = {"critic_model_name_or_path": lover, "max_train_steps": 12, "kl_coef": 0.0}
    entropy = [read_curve(ppo(entropy_coef=coef, **flags), "policy/entropy")[-1] for coef in (0.0, 0.5)]
    assert entropy[1] > entropy[0] + 0.05
    assert entropy[1] < math.log(320)


def test_updates_end_early_when_the_policy_has_moved(ppo):
    flags = {"ppo_epochs": 4, "max_train_steps": 1}
    (row,) = read_metrics(ppo(early_stop_kl=1e-7, **flags))
    assert row["policy/num_updates"] == 2, "the first minibatch is scored before anything has moved"
    (row,) = read_metrics(ppo(ppo_epochs=2, max_train_steps=1))
    last = 2 * row["policy/approx_kl"]  # the mean is of the first minibatch's, 0, and the second's
    (row,) = read_metrics(ppo(early_stop_kl=0.75 * last, **flags))
    assert row["policy/num_updates"] == 2, "the last minibatch decides, not the mean of all"
    for limit, number in ((0.99, 1), (100.0, 4)):  # the first minibatch's ratio is 1
        (row,) = read_metrics(ppo(early_stop_imp_ratio=limit, **flags))
        assert row["policy/num_updates"] == number


def test_an_update_that_goes_too_far_is_left_out(ppo, one_step):
    """ReaL's rule: actor and critic are those of the first minibatch, and each later one is looked at.

    Nothing is left of it for the next step, either.
    """
    flags = {"max_train_steps": 2, "reward_clip": 0, "ema_decay": 0.5}
    outputs = ppo(early_stop_kl=1e-7, early_stop_action="skip", ppo_epochs=4, **flags), ppo(**flags)
    for row, of_plain in zip(*map(read_metrics, outputs), strict=True):
        assert row["policy/num_updates"] == 1 and "perf/bad_steps" not in row
        for name in ("policy/grad_norm", "value/grad_norm"):
            assert row[name] == of_plain[name]
    for export in ("export", "export_ema"):
        weights = [read_weights(output / export) for output in outputs]
        assert largest_difference(*weights) == 0
    assert read_metrics(one_step)[0]["policy/grad_norm"] == read_metrics(outputs[0])[0]["policy/grad_norm"]


def test_a_correction_tells_how_far_the_sampler_is(ppo):
    flags = {"rollout_correction": "mis", "correction_low": 0.999, "correction_high": 1.001}
    flags |= {"max_train_steps": 3}
    for row in read_metrics(ppo(**flags)):  # the sampler is the policy before the updates, up to rounding
        assert row["correction/kl"] == pytest.approx(0, abs=1e-5) and row["correction/capped_fraction"] == 0
        assert row["correction/weight_max"] == pytest.approx(1, abs=1e-4)
        assert row["correction/effective_fraction"] == pytest.approx(1, abs=1e-4)
    rows = read_metrics(ppo(rollout_staleness=1, **flags))
    assert rows[0]["correction/kl"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["correction/kl"] > 0 and rows[1]["correction/weight_max"] > 1.001
    assert 0 < rows[1]["correction/capped_fraction"] <= 1 - rows[1]["correction/effective_fraction"] + 1e-6
    assert all(row["policy/ratio"] == pytest.approx(1, abs=1e-3) for row in rows), "it is taken to prox"
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1]


def test_a_step_in_which_nothing_counts_moves_nothing(ppo, tiny, tmp_path):
    flags = {"truncated": "mask", "max_answer_seq_len": 1, "max_train_steps": 1, "entropy_coef": 0.1}
    with pytest.raises(TooManyBadSteps, match="none of the 1 steps changed the model"):
        ppo(**flags, output_dir=tmp_path, save_interval=1)
    (row,) = read_metrics(tmp_path)
    assert row["rollout/finished_fraction"] == 0
    assert {"policy/loss", "policy/grad_norm", "policy/entropy"} & row.keys() == set(), "in no mean"
    (checkpoint,), _ = find_checkpoints(tmp_path)
    saved = TensorReader(checkpoint.files("actor"))
    for name, weight in read_weights(tiny.base).items():
        assert saved.read(f"causal_lm.{name}:weight").equal(weight.flatten()), name
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    "flags", [{"top_k": 3}, {"top_k": 8, "top_p": 0.9}, {"top_p": 0.7, "temperature": 0.7}], ids=str
)
def test_replayed_support_makes_ratio_and_kl_exact(ppo, flags):
    """The sampler's own probabilities, taken among what it could draw, are those of actor and reference."""
    for hybrid in ({}, {"enable_hybrid_engine": True}):
        (row,) = read_metrics(ppo(replay_sampling_support=True, max_train_steps=1, **flags, **hybrid))
        assert row["policy/logprob_gap"] < 1e-5 and row["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
        assert row["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    (cut,) = read_metrics(ppo(max_train_steps=1, **flags))
    assert row["policy/entropy"] < cut["policy/entropy"] - 0.5, "entropy is that of what could be drawn"


def test_a_base_in_4_bits_samples_as_it_is_trained(ppo, tiny):
    """Sampler, policy and reference read the same packed weights; the export has them unpacked."""
    pytest.importorskip("bitsandbytes")
    lora = {"actor_lora_dim": 4, "critic_lora_dim": 4, "actor_lora_learning_rate": 1e-2}
    outputs = [ppo(**lora, load_in_4bit=is_on, enable_hybrid_engine=True) for is_on in (True, False)]
    rows, others = map(read_metrics, outputs)
    for row in rows:
        assert row["policy/logprob_gap"] < 1e-5 and row["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5) and rows[1]["objective/kl"] != 0
    assert abs(rows[0]["policy/entropy"] - others[0]["policy/entropy"]) > 1e-4, "nothing was packed"
    export, base = read_weights(outputs[0] / "export"), read_weights(tiny.base)
    assert export.keys() == base.keys() and all(export[n].shape == base[n].shape for n in base)


@pytest.mark.parametrize("loss", ["reverse_kl", "sampled"])
def test_a_student_comes_nearer_to_its_teacher_without_a_reward(ppo, tiny, loss):
    taught = {"algorithm": "distill", "teacher_model_name_or_path": tiny.gpt2, "distill_loss": loss}
    output = ppo(**taught, critic_model_name_or_path="", eval_fraction=0.3, max_train_steps=12)
    curve, (before, after) = read_curve(output, "distill/divergence"), read_curve(output, "eval/divergence")
    assert len(curve) == 12 and sum(curve[-3:]) < 0.8 * sum(curve[:3]) and 0 < after < 0.8 * before
    assert not any(
        name.endswith(("/score", "/reward", "/win_rate")) for row in read_metrics(output) for name in row
    )
    for row in read_metrics(output, "policy/loss"):
        if loss == "reverse_kl":  # the loss is the divergence alone, a mean over tokens
            assert row["policy/loss"] == pytest.approx(row["distill/loss"], abs=1e-6)
            assert row["distill/loss"] == pytest.approx(row["distill/divergence"], abs=1e-6)
        assert row["distill/teacher_logprob"] < 0
