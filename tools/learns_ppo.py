"""Checks of `tools.doctor --learns` for step 3: prompts, sampler, rewards, actor, critic."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from common.data.collators import collate_pairs, collate_prompts
from common.data.data_options import parse_data_split
from common.data.global_batches import GlobalBatches, RowPlan, evaluation_batches
from common.data.packed_batch import PackedBatch
from common.data.stage_datasets import StageData, build_data
from common.engine.engine_step import take_steps
from common.models.tensor_ops import wilson_interval
from common.programs import startup
from step2_reward.answer_scores import compute_pair_scores
from step2_reward.pair_trainer import evaluate_pairs
from step3_ppo.build_trainer import build_run, build_trainer
from step3_ppo.checks import PPOStart, check_start_up
from step3_ppo.hooks import HOOKS
from step3_ppo.metrics import explained_variance
from step3_ppo.ppo_math import constant_groups
from step3_ppo.ppo_trainer import PPOTrainer
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.rewards.text_rewards import Answers, TextReward
from tools.doctor import NOTE, Line, judged
from tools.learns import CHANGED, check_template, fit, spread

NUM_RESPONSES = 64  # of a step
MAX_GROUP = 16  # responses to a prompt
MAX_NEW_TOKENS = 32  # of the responses whose reward is their length
STEPS_PER_FACTOR = 4
# Rise of the mean over two steps, in standard deviations of the first responses' lengths: more than three
# standard errors of its difference from the first step's mean, sqrt(1/128 + 1/64) = 0.15.
MIN_RISE = 0.5
MIN_EXPLAINED = 0.5  # of the variance of the returns that the critic was trained on; 0 is their mean
MAX_CUT = 0.5  # share of prompts without their beginning; beyond, most
MIN_FINISHED = 0.5  # share of responses that end; below, most are scored as they were cut
CHANGED_PPO = (
    *(*CHANGED, "--eval_prompts", "0", "--keep_best=", "--eval_data_path", "--save_rollouts", "0"),
    *("--ppo_epochs", "1", "--generation_batches", "1", "--rollout_staleness", "0"),
    *("--dynamic_sampling_rounds", "0", "--inference_tp_size", "1", "--unsupervised_dataset_name="),
    *("--old_logprobs", "recompute", "--early_stop_kl", "0"),
)


def check_ppo(args: Any, words: list[str]) -> Iterator[Line]:
    """Step 3, from its prompts to its critic; `args` are the flags that `words` give."""
    group = min(max(args.num_samples_per_prompt, 2), MAX_GROUP)
    samples = NUM_RESPONSES // group * group
    rows = max(n for n in range(1, args.per_device_training_batch_size + 1) if samples % n == 0)
    sizes = {
        "num_samples_per_prompt": group,
        "per_device_generation_batch_size": samples // group,
        "per_device_training_batch_size": rows,
        "gradient_accumulation_steps": samples // rows,
    }
    start = check_start_up("", [*words, *CHANGED_PPO, *(f"--{name}={size}" for name, size in sizes.items())])
    data = startup.enter(start)
    yield check_template(start.template, data)
    yield check_prompts(data, start.args.max_prompt_seq_len)
    trainer, run = build(start, data, samples // group)
    batches: list[PackedBatch] = []
    HOOKS["after_step"].append(lambda _, batch: batches.append(batch))
    metrics = trainer.train_step(1, run)
    yield check_sampler(trainer, metrics)
    share = metrics["rollout/finished_fraction"]
    text = f"{share:.2f} within --max_answer_seq_len {start.args.max_answer_seq_len} (should be most)"
    cure = "raise it, or train the actor to end: --learns --stage 1"
    yield judged("responses end", text, cure, is_ok=share >= MIN_FINISHED, is_note=share > 0)
    if "scores" not in batches[0].data:
        yield NOTE, "rewards in a group", "not checked, nor are the updates: a teacher replaces the rewards"
        return
    yield check_groups(batches[0], trainer.rollout.scores)
    yield from check_reward_models(start, trainer)
    yield check_length_reward(start, trainer, run, batches[0])
    if trainer.roles.critic:
        yield check_critic(trainer, batches[0])


def build(start: PPOStart, data: StageData, num_prompts: int) -> tuple[PPOTrainer, Any]:
    """The trainer of a run, and the run, whose frozen models are not read for a fingerprint."""
    plan = RowPlan(num_prompts, 1, rows_flag="prompts of a checked step", data_name="prompt data")
    prompts = GlobalBatches.by_rows(data.train, collate_prompts, plan, start.args.seed, data.sources)
    trainer = build_trainer(start, 1, prompts)
    start.frozen = {}
    run = build_run(start, trainer, prompts, data)
    run.begin()
    return trainer, run


# ---- one step with the run's own reward -----------------------------------------------------------------


def check_prompts(data: StageData, max_tokens: int) -> Line:
    """Whether prompts differ, and are whole."""
    prompts = [tuple(data.train[i]["prompt_ids"]) for i in spread(len(data.train))]
    cut = data.report.num_truncated / (data.report.num_train + data.report.num_eval)
    text = f"{len(set(prompts))} of {len(prompts)} differ (should be all), {cut:.0%} are cut (should be few)"
    cure = f"raise --max_prompt_seq_len {max_tokens}; look at the prompts with tools.check_data --stage 3"
    return judged("prompts", text, cure, is_ok=len(set(prompts)) > 1 and cut <= MAX_CUT)


def check_sampler(trainer: PPOTrainer, metrics: dict[str, float]) -> Line:
    """Whether sampler and trainer give the same log-probabilities, and the first ratio is 1."""
    gap = metrics["policy/logprob_gap"]
    ratio = metrics["policy/ratio"]
    limit = trainer.rollout.trusted_gap
    text = f"policy/logprob_gap {gap:.1e} (should be below {limit:g}), first policy/ratio {ratio:.4f} (1)"
    cure = "leave out --enable_hybrid_engine or --plugins, or give --dtype fp32; docs/hybrid_engine.md"
    return judged("sampler is trainer", text, cure, is_ok=gap < limit and abs(ratio - 1) < limit)


def check_groups(batch: PackedBatch, scores: Scorer) -> Line:
    """Whether scores of responses to the same prompt differ: else nothing is learned from the group."""
    groups = batch.numbers("group_ids")
    has_score = scores.has_scores(batch)
    is_constant = constant_groups(batch.numbers("scores"), groups, has_score)
    num_groups = len(groups.unique())
    count = len(groups[~is_constant].unique())
    responses = [tuple(ids.tolist()) for ids in batch.sequences("response_ids")]
    texts = set(zip(groups.tolist(), responses, strict=True))
    cure = f"different responses have the same score, {float(batch.numbers('scores')[0]):g}: --reward"
    if not has_score.all():
        cure = f"--reward fails for {int((~has_score).sum())} responses: {scores.first_failure}"
    elif len(texts) == num_groups:
        cure = "the responses to a prompt are the same: --temperature, --top_k, --top_p"
    text = f"{count} of {num_groups} groups have different scores (should be most)"
    return judged("rewards in a group", text, cure, is_ok=2 * count > num_groups, is_note=count > 0)


def check_reward_models(start: PPOStart, trainer: PPOTrainer) -> Iterator[Line]:
    """Accuracy of each reward model on pairs of the data, beside that of "the longer one is better"."""
    args = start.args
    first, second, third = parse_data_split(args.data_split or "0,0,1")
    options = replace(
        start.options,
        stage=2,
        max_tokens=args.max_prompt_seq_len + args.max_answer_seq_len,
        data_split=f"{first + second},{third},0",  # step 3's share: a reward model was trained on step 2's
        eval_fraction=0.0,
        is_scored=True,
    )
    for name, role in trainer.roles.rewards.items():
        try:
            pairs = build_data(options, start.template).train
        except ValueError:  # no preference pairs
            yield NOTE, "reward model", f"{name} is not compared with length: --data_path has no pairs"
            continue
        rows = [pairs[i] for i in spread(len(pairs))]
        batches = evaluation_batches(rows, collate_pairs, rows_per_batch=args.per_device_training_batch_size)
        with role.scoring():
            figures = evaluate_pairs(lambda b, r=role: compute_pair_scores(r.model, b)[:2], batches)
        accuracy = figures["accuracy"]
        longer = max(figures["longer_is_chosen"], 1 - figures["longer_is_chosen"])
        low = wilson_interval(accuracy * len(rows), len(rows)).low
        text = (
            f"{name} is right in {accuracy:.2f} of {len(rows)} pairs, at least {low:.2f} with 95 % "
            f"confidence (should exceed 0.50), length alone in {longer:.2f} (should be less)"
        )
        is_ok = low > 0.5 and accuracy > longer
        yield judged("reward model", text, "train it longer or on other pairs; docs/rewards.md", is_ok=is_ok)


# ---- updates --------------------------------------------------------------------------------------------


class LengthReward(TextReward):
    """Characters of a response, in standard deviations from the mean of the first responses."""

    first: torch.Tensor | None = None

    def score(self, answers: Answers) -> list[float]:
        """One score per response; 0 on average the first time."""
        lengths = torch.tensor([len(text) for text in answers.responses], dtype=torch.float64)
        self.first = lengths if self.first is None else self.first
        return ((lengths - self.first.mean()) / (float(self.first.std(correction=0)) or 1.0)).tolist()


def check_length_reward(start: PPOStart, trainer: PPOTrainer, run: Any, batch: PackedBatch) -> Line:
    """Whether the actor moves, and gives longer responses if their length is the only reward."""
    roles = trainer.roles
    reward = LengthReward("length", start.args)
    trainer.rollout.scores.close()
    specs = [RewardSpec("function", "", 1.0, "length")]
    trainer.rollout.scores = Scorer(specs, {"length": reward}, start.decode)
    shaping = {"truncated": "score", "truncated_score": None}
    vars(start.args).update(shaping, length_reward_tokens=0, overlong_buffer_tokens=0)
    roles.rewards = {}
    most = min(start.args.max_answer_seq_len, MAX_NEW_TOKENS)
    roles.actor.sampling = replace(roles.actor.sampling, max_new_tokens=most)
    parts = trainer.rollout.score_cap.cut(batch)
    before = torch.cat(roles.actor.score(parts))
    scores: list[float] = []

    def take_step() -> float:
        scores.append(trainer.train_step(1, run)["objective/score"])
        return sum(scores[-2:]) / 2 - scores[0] if len(scores) > 2 else 0.0

    engines = [role.model for role in (roles.actor, roles.critic) if role]
    rises, factor = fit(engines, take_step, lambda rise: rise >= MIN_RISE, STEPS_PER_FACTOR)
    text = (
        f"score {rises[-1]:+.2f} standard deviations after {len(rises)} updates (should reach +{MIN_RISE}), "
        f"at up to {factor} times the learning rates"
    )
    cure = "look at --kl_coef, --algorithm, --policy_loss, --adv_norm, --actor_learning_rate"
    if torch.equal(before, torch.cat(roles.actor.score(parts))):
        cure = "no weight moves: --actor_learning_rate, --actor_lora_learning_rate, frozen weights"
    elif not reward.first.std():
        return NOTE, "learns a length", f"not checked: all responses have {reward.first[0]:g} characters"
    return judged("learns a length", text, cure, is_ok=rises[-1] >= MIN_RISE)


def check_critic(trainer: PPOTrainer, batch: PackedBatch) -> Line:
    """Whether the critic can fit the returns of one batch."""
    trainer.args.value_clip_range = 0.0  # around old values that no longer are
    critic = trainer.roles.critic
    parts = trainer.rollout.cap.cut(batch)
    returns = torch.cat([part.data["returns"] for part in parts])

    values: list[torch.Tensor] = []  # before each update, and after the last

    def compute_share() -> float:
        values.append(torch.cat([of_part.cpu() for of_part, _ in critic.score(parts)]))
        return explained_variance(values[-1], returns)

    def take_step() -> float:
        take_steps([trainer.losses.compute_critic_gradients(parts)])
        return compute_share()

    first = compute_share()
    shares, factor = fit([critic.model], take_step, lambda share: share > MIN_EXPLAINED, STEPS_PER_FACTOR)
    text = (
        f"{first:.2f} -> {shares[-1]:.2f} of the variance of one batch's returns after {len(shares)} updates "
        f"(should exceed {MIN_EXPLAINED}), at up to {factor} times the learning rates"
    )
    if torch.equal(values[0], values[-1]):
        cure = "no value moves: --critic_learning_rate, --critic_lora_learning_rate, frozen weights"
        return judged("critic explains", text, cure, is_ok=False)
    cure = "raise --critic_learning_rate, or scale returns by --value_norm"
    is_note = max(shares) > max(first, 0.0)
    return judged("critic explains", text, cure, is_ok=shares[-1] > MIN_EXPLAINED, is_note=is_note)
