"""Checks of `tools.doctor --learns` for step 3: prompts, sampler, rewards, actor, critic."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from common.data.collators import collate_pairs, collate_prompts
from common.data.data_options import parse_data_split
from common.data.global_batches import GlobalBatches, RowPlan, evaluation_batches
from common.data.packed_batch import PackedBatch
from common.data.stage_datasets import StageData, build_data
from common.engine.engine_step import take_steps
from common.programs import startup
from common.ranks.digests import word_sum
from common.ranks.zero3 import local_shard
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
from tools.learns import CHANGED, check_template, fit, spread, within

NUM_RESPONSES = 32  # of a step: if none ends, fewer than 9 % do, with 95 % confidence
MIN_GROUP = 4  # responses to a prompt, which is computed once for them
MAX_GROUP = 8
NUM_UPDATED = 4  # responses that are trained on before their reward is their length
MAX_NEW_TOKENS = 8  # of the responses whose reward is their length
STEPS_PER_FACTOR = 4
LIMIT_SECONDS = 30.0  # of the updates of a check
MIN_RISE = 3.0  # standard errors: by chance, one of a thousand means rises as far
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
    group = min(max(args.num_samples_per_prompt, MIN_GROUP), MAX_GROUP)
    num_prompts = NUM_RESPONSES // group
    sizes = {
        "num_samples_per_prompt": group,
        "per_device_generation_batch_size": num_prompts,
        **update_sizes(num_prompts * group, min(args.per_device_training_batch_size, NUM_UPDATED)),
        "gradient_accumulation_steps": 1,  # of the first step, which ends after an update
    }
    start = check_start_up("", [*words, *CHANGED_PPO, *(f"--{name}={size}" for name, size in sizes.items())])
    data = startup.enter(start)
    yield check_template(start.template, data)
    yield check_prompts(data, start.args.max_prompt_seq_len)
    trainer, run = build(start, data, num_prompts)
    batches: list[PackedBatch] = []
    HOOKS["after_step"].append(lambda _, batch: batches.append(batch))
    HOOKS["after_update"].append(end_step)
    metrics = trainer.train_step(1, run)
    HOOKS["after_update"].remove(end_step)
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
    vars(start.args).update(update_sizes(num_prompts * group, args.per_device_training_batch_size))
    yield check_length_reward(start, trainer, run, batches)
    if trainer.roles.critic:
        yield check_critic(trainer, batches[1])


def end_step(trainer: PPOTrainer, _: Any) -> None:
    """Hook after an update that leaves out the other updates of the step."""
    trainer.open_step.is_done = True


def update_sizes(samples: int, most: int) -> dict[str, int]:
    """Flags of an update on all samples, in equal micro-batches of at most `most`."""
    rows = max(n for n in range(1, most + 1) if samples % n == 0)
    return {"per_device_training_batch_size": rows, "gradient_accumulation_steps": samples // rows}


def build(start: PPOStart, data: StageData, num_prompts: int) -> tuple[PPOTrainer, Any]:
    """The trainer of a run, whose steps all have the same prompts, and the run, whose frozen models are not
    read for a fingerprint.
    """
    plan = RowPlan(num_prompts, 1, rows_flag="prompts of a checked step", data_name="prompt data")
    # Short prompts are fast.
    rows = sorted((data.train[i] for i in spread(len(data.train))), key=lambda row: len(row["prompt_ids"]))
    prompts = GlobalBatches.by_rows(rows[:num_prompts], collate_prompts, plan, start.args.seed)
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
            figures = evaluate_pairs(
                lambda batch, role=role: compute_pair_scores(role.model, batch)[:2],
                within(LIMIT_SECONDS, batches),
            )
        num_read = figures["pairs"]
        longer = max(figures["longer_is_chosen"], 1 - figures["longer_is_chosen"])
        text = (
            f"{name} is right in {figures['accuracy']:.2f} of {num_read} pairs, at least "
            f"{figures['accuracy_low']:.2f} with 95 % confidence (should exceed 0.50), length alone in "
            f"{longer:.2f} (should be less)"
        )
        cure = "train it longer or on other pairs; docs/rewards.md"
        is_ok = figures["accuracy_low"] > 0.5 and figures["accuracy"] > longer
        # More pairs could decide it.
        is_note = num_read < len(rows) and figures["accuracy_high"] > max(longer, 0.5)
        yield judged("reward model", text, cure, is_ok=is_ok, is_note=is_note)


# ---- updates --------------------------------------------------------------------------------------------


class LengthReward(TextReward):
    """Characters of a response, in standard deviations from the mean of the first responses."""

    first: torch.Tensor | None = None

    def score(self, answers: Answers) -> list[float]:
        """One score per response; 0 on average the first time."""
        lengths = torch.tensor([len(text) for text in answers.responses], dtype=torch.float64)
        self.first = lengths if self.first is None else self.first
        return ((lengths - self.first.mean()) / (float(self.first.std(correction=0)) or 1.0)).tolist()


def weight_sums(engine: Any) -> list[int]:
    """A number of each trained weight, which changes with it."""
    return [int(word_sum(local_shard(p))) for p in engine.module.parameters() if p.requires_grad]


def rise_of(first: torch.Tensor, last: torch.Tensor) -> float:
    """Difference of two means in standard errors (Welch)."""
    error = float((first.var() / len(first) + last.var() / len(last)).sqrt())
    return float(last.mean() - first.mean()) / max(error, 1e-9)  # samples may not vary


def check_length_reward(
    start: PPOStart, trainer: PPOTrainer, run: Any, batches: Sequence[PackedBatch]
) -> Line:
    """Whether the actor moves, and gives longer responses if their length is the only reward. `batches` has
    the batch of the first step, and gets those of the next ones.
    """
    roles = trainer.roles
    trainer.rollout.scores.close()
    reward = {"length": LengthReward("length", start.args)}
    trainer.rollout.scores = Scorer([RewardSpec("function", "", 1.0, "length")], reward, start.decode)
    roles.rewards = {}
    vars(start.args).update(
        truncated="score", truncated_score=None, length_reward_tokens=0, overlong_buffer_tokens=0
    )
    most = min(start.args.max_answer_seq_len, MAX_NEW_TOKENS)
    roles.actor.sampling = replace(roles.actor.sampling, max_new_tokens=most)
    before = weight_sums(roles.actor.model)
    scores: list[torch.Tensor] = []

    def take_step() -> float:
        trainer.train_step(1, run)
        scores.append(batches[-1].numbers("scores"))
        return rise_of(scores[0], scores[-1])

    engines = [role.model for role in (roles.actor, roles.critic) if role]
    done = fit(engines, take_step, lambda rise: rise > MIN_RISE, STEPS_PER_FACTOR, LIMIT_SECONDS)
    groups = batches[1].numbers("group_ids")
    if constant_groups(scores[0], groups, torch.ones_like(groups, dtype=torch.bool)).all():
        return NOTE, "learns a length", "not checked: the responses to a prompt have the same length"
    if done.values[-1] < -MIN_RISE:
        done = done._replace(is_late=False)  # more updates would not make it rise
    text = f"the mean rose by {done.values[-1]:+.1f} standard errors (should exceed {MIN_RISE:g})"
    cure = "look at --kl_coef, --algorithm, --policy_loss, --adv_norm, --actor_learning_rate"
    has_moved = before != weight_sums(roles.actor.model)
    return done.judge("learns a length", text, cure, role="actor_", has_moved=has_moved)


def check_critic(trainer: PPOTrainer, batch: PackedBatch) -> Line:
    """Whether the critic can fit the returns of one batch."""
    trainer.args.value_clip_range = 0.0  # around old values that no longer are
    critic = trainer.roles.critic
    parts = trainer.rollout.cap.cut(batch)
    returns = torch.cat([part.data["returns"] for part in parts])
    before = weight_sums(critic.model)

    def take_step() -> float:
        """Update; the share that was explained before."""
        values = torch.cat([of_part.cpu() for of_part, _ in critic.score(parts)])
        take_steps([trainer.losses.compute_critic_gradients(parts)])
        return explained_variance(values, returns)

    done = fit(
        [critic.model], take_step, lambda share: share > MIN_EXPLAINED, STEPS_PER_FACTOR, LIMIT_SECONDS
    )
    text = (
        f"{done.values[0]:.2f} -> {done.values[-1]:.2f} of the variance of a batch's returns "
        f"(should exceed {MIN_EXPLAINED})"
    )
    cure = "raise --critic_learning_rate, or scale returns by --value_norm"
    has_moved = before != weight_sums(critic.model)
    is_note = max(done.values) > max(done.values[0], 0.0)
    return done.judge("critic explains", text, cure, role="critic_", has_moved=has_moved, is_note=is_note)
