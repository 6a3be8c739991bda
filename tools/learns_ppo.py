"""Checks of `tools.doctor --learns` for step 3: prompts, reward, sampler, actor, critic."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from common.data.collators import collate_pairs, collate_prompts
from common.data.data_options import check_sources, parse_data_split
from common.data.global_batches import GlobalBatches, RowPlan, evaluation_batches
from common.data.packed_batch import PackedBatch
from common.data.stage_datasets import StageData, build_data
from common.engine.engine_step import take_steps
from common.models.tensor_ops import wilson_interval
from common.programs import startup
from common.runs.run import Run
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
from tools.doctor import NOTE, OK, PROBLEM, Line
from tools.learns import CHANGED, NUM_READ, Fit, check_template, fit, spread

NUM_RESPONSES = 64  # of a step
MAX_GROUP = 16  # responses to a prompt
MAX_NEW_TOKENS = 32  # of the responses whose reward is their length
STEPS_PER_FACTOR = 6
# Rise of the mean over two steps, in standard deviations of the first responses' lengths: more than three
# standard errors of its difference from the first step's mean, each sqrt(1/128 + 1/64) = 0.15.
MIN_RISE = 0.5
MIN_EXPLAINED = 0.5  # of the variance of the returns that the critic was trained on; 0 is their mean
MAX_CUT_PROMPTS = 0.5  # of the rows: beyond, most prompts lack their beginning
MIN_FINISHED = 0.5  # of the responses, below which a note says that most are cut
RATES = "--actor_learning_rate, --actor_lora_learning_rate, --actor_lora_module_name"
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
    changed = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    start = check_start_up("", [*words, *CHANGED_PPO, *changed])
    data = startup.enter(start)
    assert data is not None  # no dry run, no finished run
    yield check_template(start.template, data)
    yield check_prompts(data, start.args.max_prompt_seq_len)
    trainer, run = build(start, data)
    first: list[PackedBatch] = []
    HOOKS["after_step"].append(lambda trainer, batch: first.append(batch))
    try:
        metrics = trainer.train_step(1, run)
    finally:
        HOOKS["after_step"].pop()
    batch = first[0]
    yield check_sampler(trainer, metrics)
    yield check_finished(metrics["rollout/finished_fraction"], start.args.max_answer_seq_len)
    if "scores" not in batch.data:
        yield NOTE, "rewards in a group", "there are no rewards: the run learns from its teacher"
        return
    yield check_groups(batch, trainer.rollout.scores)
    yield from check_reward_models(start, trainer)
    yield check_length_reward(start, trainer, run, batch)
    if trainer.roles.critic:
        yield check_critic(trainer, batch)


def build(start: PPOStart, data: StageData) -> tuple[PPOTrainer, Run]:
    """The trainer of a run, and the run, whose frozen models are not read for a fingerprint."""
    args = start.args
    with startup.as_problem(start.problems):
        plan = RowPlan(
            args.per_device_generation_batch_size,
            1,
            rows_flag="prompts of a checked step",
            data_name="prompt data",
        )
        prompts = GlobalBatches.by_rows(data.train, collate_prompts, plan, args.seed, data.sources)
        trainer = build_trainer(start, 1, prompts)
    start.frozen = {}
    run = build_run(start, trainer, prompts, data)
    run.begin()
    return trainer, run


# ---- one step with the run's own reward -----------------------------------------------------------------


def check_prompts(data: StageData, max_tokens: int) -> Line:
    """Whether prompts differ, and are whole."""
    rows = [tuple(data.train[i]["prompt_ids"]) for i in spread(len(data.train), NUM_READ)]
    num_rows = data.report.num_train + data.report.num_eval
    cut = data.report.num_truncated
    text = f"{len(set(rows))} of {len(rows)} differ, {cut} of {num_rows} are cut (should be all, and few)"
    if cut > MAX_CUT_PROMPTS * num_rows:
        return PROBLEM, "prompts", f"{text}; raise --max_prompt_seq_len {max_tokens}"
    if len(set(rows)) == 1 < len(rows):
        return PROBLEM, "prompts", f"{text}; look at --data_path and --columns with tools.check_data"
    return OK, "prompts", text


def check_sampler(trainer: PPOTrainer, metrics: dict[str, float]) -> Line:
    """Whether sampler and trainer give the same log-probabilities, and the first ratio is 1."""
    gap = metrics["policy/logprob_gap"]
    ratio = metrics.get("policy/ratio", 1.0)  # without a token in the loss
    trusted = trainer.rollout.trusted_gap
    text = f"policy/logprob_gap {gap:.1e} (should be below {trusted:g}), first policy/ratio {ratio:.4f} (1)"
    if gap < trusted and abs(ratio - 1) < trusted:
        return OK, "sampler is trainer", text
    cure = "--enable_hybrid_engine true or false, --dtype fp32, --plugins; docs/hybrid_engine.md"
    return PROBLEM, "sampler is trainer", f"{text}; {cure}"


def check_finished(share: float, max_tokens: int) -> Line:
    """Share of responses that end before --max_answer_seq_len."""
    text = f"{share:.2f} within --max_answer_seq_len {max_tokens} (should be most)"
    cure = "raise it, or train the actor to end: --learns --stage 1"
    if share == 0:
        return PROBLEM, "responses end", f"{text}; {cure}"
    return (NOTE, "responses end", f"{text}; {cure}") if share < MIN_FINISHED else (OK, "responses end", text)


def check_groups(batch: PackedBatch, scores: Scorer) -> Line:
    """Whether scores of responses to the same prompt differ: else nothing is learned from the group."""
    name = "rewards in a group"
    groups = batch.numbers("group_ids")
    is_constant = constant_groups(batch.numbers("scores"), groups, scores.has_scores(batch))
    num_groups = len(groups.unique())
    count = len(groups[~is_constant].unique())
    text = f"{count} of {num_groups} groups have different scores (should be most)"
    if not scores.has_scores(batch).any():
        return PROBLEM, name, f"{text}; the reward fails for every response: {scores.first_failure}"
    if count:
        return NOTE if 2 * count < num_groups else OK, name, text
    pairs = zip(groups.tolist(), batch.sequences("response_ids"), strict=True)
    texts = {(group, *ids.tolist()) for group, ids in pairs}
    if len(texts) == num_groups:
        cure = "the responses to a prompt are all the same: --temperature, --top_k, --top_p"
        return PROBLEM, name, f"{text}; {cure}"
    cure = f"different responses get the same score, {float(batch.numbers('scores')[0]):g}: --reward"
    return PROBLEM, name, f"{text}; {cure}"


def check_reward_models(start: PPOStart, trainer: PPOTrainer) -> Iterator[Line]:
    """Accuracy of each reward model on pairs of the data, beside that of "the longer one is better"."""
    args = start.args
    if not trainer.roles.rewards:
        return
    split = ""
    if args.data_split:  # the share of step 3, on which the reward model was not trained
        first, second, third = parse_data_split(args.data_split)
        split = f"{first + second},{third},0"
    most = args.max_prompt_seq_len + args.max_answer_seq_len
    changes = {"max_tokens": most, "is_scored": True, "data_split": split, "eval_fraction": 0.0}
    options = replace(start.options, stage=2, **changes)
    try:
        problems = check_sources(options, start.tokenizer)
        rows = [] if problems else build_data(options, start.template).train
    except ValueError:
        rows = []
    if not rows:
        yield NOTE, "reward model", "not compared with length: --data_path has no preference pairs"
        return
    pairs = [rows[i] for i in spread(len(rows), NUM_READ)]
    size = args.per_device_training_batch_size
    for name, role in trainer.roles.rewards.items():
        with role.scoring():
            batches = evaluation_batches(pairs, collate_pairs, rows_per_batch=size)
            figures = evaluate_pairs(lambda b, r=role: compute_pair_scores(r.model, b)[:2], batches)
        accuracy = figures["accuracy"]
        longer = max(figures["longer_is_chosen"], 1 - figures["longer_is_chosen"])
        low = wilson_interval(accuracy * len(pairs), len(pairs)).low
        text = f"{name} is right in {accuracy:.2f} of {len(pairs)} pairs, length alone in {longer:.2f} "
        text += "(should be less, and 0.50 outside the 95 % interval)"
        if accuracy <= longer or low <= 0.5:
            yield PROBLEM, "reward model", f"{text}; train it again: step 2, docs/rewards.md"
        else:
            yield OK, "reward model", text


# ---- updates --------------------------------------------------------------------------------------------


class LengthReward(TextReward):
    """Characters of a response, in standard deviations from the mean of the first responses."""

    first: torch.Tensor | None = None

    def score(self, answers: Answers) -> list[float]:
        """One score per response; 0 on average the first time."""
        lengths = torch.tensor([len(text) for text in answers.responses], dtype=torch.float64)
        self.first = lengths if self.first is None else self.first
        spread_of_first = float(self.first.std(correction=0)) or 1.0
        return ((lengths - self.first.mean()) / spread_of_first).tolist()


def check_length_reward(start: PPOStart, trainer: PPOTrainer, run: Run, batch: PackedBatch) -> Line:
    """Whether the actor moves, and learns longer responses if their length is the only reward."""
    name = "learns a length"
    roles = trainer.roles
    args = start.args
    reward = LengthReward("length", args)
    trainer.rollout.scores.close()
    trainer.rollout.scores = Scorer(
        [RewardSpec("function", "", 1.0, "length")], {"length": reward}, start.decode
    )
    args.truncated, args.truncated_score = "score", None
    args.length_reward_tokens = args.overlong_buffer_tokens = 0
    roles.rewards = {}
    shorter = min(args.max_answer_seq_len, MAX_NEW_TOKENS)
    roles.actor.sampling = replace(roles.actor.sampling, max_new_tokens=shorter)
    before = actor_logprobs(trainer, batch)
    scores: list[float] = []

    def take_step() -> float:
        scores.append(trainer.train_step(1, run)["objective/score"])
        return float(actor_logprobs(trainer, batch).sub(before).abs().max())

    engines = [role.model for role in (roles.actor, roles.critic) if role]
    moves = fit(engines, take_step, lambda _: rise(scores) >= MIN_RISE, STEPS_PER_FACTOR)
    assert reward.first is not None
    if not any(moves.values):
        text = f"no log-probability changed in {len(scores)} updates (should)"
        return PROBLEM, "actor moves", f"{text}; {RATES}, frozen weights"
    if float(reward.first.std()) == 0:
        return NOTE, name, f"not checked: all responses have {reward.first[0]:g} characters"
    text = f"score {rise(scores):+.2f} standard deviations after {len(scores)} updates "
    text += f"(should reach {MIN_RISE:+g}), at up to {moves.factor} times --actor_learning_rate"
    if rise(scores) >= MIN_RISE:
        return OK, name, text
    return PROBLEM, name, f"{text}; look at --kl_coef, --algorithm, --policy_loss, --adv_norm, {RATES}"


def rise(scores: Sequence[float]) -> float:
    """Mean of the last two scores minus the first; 0 for fewer than three."""
    return sum(scores[-2:]) / 2 - scores[0] if len(scores) > 2 else 0.0


def actor_logprobs(trainer: PPOTrainer, batch: PackedBatch) -> torch.Tensor:
    """Log-probabilities (total,) of a batch's response tokens by the current actor."""
    return torch.cat(trainer.roles.actor.score(trainer.rollout.score_cap.cut(batch)))


def check_critic(trainer: PPOTrainer, batch: PackedBatch) -> Line:
    """Whether the critic can fit the returns of one batch."""
    name = "critic explains"
    trainer.args.value_clip_range = 0.0  # the old values are those of the first step
    critic = trainer.roles.critic
    parts = trainer.rollout.cap.cut(batch)
    returns = torch.cat([part.data["returns"] for part in parts])
    if float(returns.std()) == 0:
        return NOTE, name, "not checked: all returns are the same"

    def take_step() -> float:
        values = torch.cat([values.cpu() for values, _ in critic.score(parts)])
        take_steps([trainer.losses.compute_critic_gradients(parts)])
        return explained_variance(values, returns)

    fitted = fit([critic.model], take_step, lambda shares: shares[-1] > MIN_EXPLAINED)
    return describe_critic(fitted)


def describe_critic(fitted: Fit) -> Line:
    """The line of the fitted returns."""
    name = "critic explains"
    flag = "--critic_learning_rate"
    text = f"{fitted.values[0]:.2f} -> {max(fitted.values):.2f} of the variance of one batch's returns after "
    text += f"{len(fitted.values)} updates (should exceed {MIN_EXPLAINED})"
    if not fitted.has_moved:
        return PROBLEM, name, f"{text}; its values do not move: {flag}, --critic_lora_learning_rate"
    text += f", at up to {fitted.factor} times {flag}"
    if max(fitted.values) > MIN_EXPLAINED:
        return OK, name, text
    state = PROBLEM if max(fitted.values) <= max(fitted.values[0], 0.0) else NOTE
    return state, name, f"{text}; raise {flag}, or use --value_norm, --whiten_scores"
