"""Checks of step 3 before a model is loaded: flags, models, rewards, the algorithm and its requirements."""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from common.data.data_options import DataOptions, check_sources
from common.data.tokenizer import vocabulary_difference
from common.engine.ds_config import effective_zero_stage
from common.flags.args import Problems
from common.flags.problems import given_flags
from common.generation.decode_probe import why_not_generated
from common.generation.tp_plans import NoPlan, build_cuts
from common.models.four_bit import incompatible_flags
from common.models.saved_adapters import check_supported, is_adapter
from common.models.tensor_ops import wilson_interval
from common.models.value_model import has_saved_head
from common.programs import model_checks, startup
from common.programs.startup import Start
from common.ranks import distributed
from common.runs.export import read_metadata
from step3_ppo.algorithms import Algorithm, fill_defaults, find_algorithm, unused_flags
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_roles import (
    RoleSpec,
    build_role_specs,
    default_critic,
    default_rewards,
    describe_bases,
    fill_ranks,
)
from step3_ppo.environments import KIND, import_environment
from step3_ppo.policy_losses import PolicyLossFunction, build_policy_loss
from step3_ppo.rewards.reward_specs import RewardSpec, check_rewards

VERIFIABLE = ("function", "http", KIND)  # kinds of rewards that can check an answer
MIN_REWARD_ACCURACY = 0.6  # on held-out pairs; a lower one causes a warning


@dataclass
class PPOStart(Start):
    """The flags of step 3, and the results of its checks."""

    algorithm: Algorithm | None = None
    policy_loss: PolicyLossFunction | None = None
    rewards: list[RewardSpec] = field(default_factory=list)

    def decode(self, token_ids: torch.Tensor) -> str:
        """Text of token ids, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


def check_start_up(description: str, argv: Sequence[str] | None = None) -> PPOStart:
    """Parse and check the flags, fill in the algorithm's defaults, and return the result.

    `argv` defaults to sys.argv[1:]. Prints all problems and exits if there are any. Loads no model.
    """
    start = startup.read_flags(PPOArguments, 3, description, argv, PPOStart)
    args, problems = start.args, start.problems
    check_flags(args, distributed.world_size(), distributed.dtype_name(args.dtype), problems)
    with problems.catch():
        algorithm = start.algorithm = find_algorithm(args.algorithm)
        args = start.args = fill_defaults(args, algorithm)
        with problems.catch():
            start.policy_loss = build_policy_loss(args)
        if algorithm.needs_critic:
            args.critic_model_name_or_path = default_critic(args)
        fill_ranks(args, problems)
        problems.add_if(
            args.ref_ema_decay and args.actor_lora_dim,
            f"--ref_ema_decay {args.ref_ema_decay} averages whole weights, but with adapters of rank "
            f"{args.actor_lora_dim} the reference is the actor without adapters; leave one of them out",
        )
        for problem in incompatible_flags(args):
            problems.add(problem)
        check_algorithm(args, algorithm, problems)
        check_teacher(args, algorithm, problems)
        unused = ", ".join(f"--{name}" for name in unused_flags(algorithm, given_flags(start.argv)))
        start.notes += [f"--algorithm {algorithm.name} does not use {unused}"] if unused else []
    start.rewards = find_rewards(args, start.algorithm, problems)
    has_critic = start.algorithm is None or start.algorithm.needs_critic
    specs = build_role_specs(args, start.rewards, has_critic=has_critic)
    start.tokenizer = check_models(args, specs, problems)
    start.notes += describe_bases(args, specs, problems)
    if args.batches_per_step > args.generation_batches:
        start.notes.append(
            f"an optimizer step takes --per_device_training_batch_size x --gradient_accumulation_steps = "
            f"{args.samples_per_update} samples: a PPO step generates {args.batches_per_step} batches"
        )
    start.frozen = frozen_models(specs, start.rewards)
    check_evaluation(args, start.options, start.rewards, problems, start.tokenizer)
    startup.finish_checks(start, "--actor_model_name_or_path")
    startup.print_note(*reward_warnings(args, start.rewards))
    return start


def frozen_models(specs: list[RoleSpec], rewards: list[RewardSpec]) -> dict[str, str]:
    """Path of each frozen model, the base of adapters included, by its flag."""
    paths = {f"--reward {s.kind}:{s.target}": s.target for s in rewards if s.kind in ("model", "classifier")}
    for spec in specs:
        has_frozen_weights = not spec.is_trained or spec.flags.lora_dim or is_adapter(spec.path)
        if has_frozen_weights and not spec.is_reward:
            paths[spec.flag] = spec.path
    return paths


def check_flags(args: PPOArguments, num_ranks: int, dtype: str, problems: Problems) -> None:
    """Add the problems of flags that conflict with each other or with the number of ranks."""

    def given(*names: str, by: str = " x ") -> str:
        return by.join(f"--{name} {getattr(args, name)}" for name in names)

    samples, update = args.samples_per_step, args.samples_per_update
    sampled = given("per_device_generation_batch_size", "generation_batches", "num_samples_per_prompt")
    trained = given("per_device_training_batch_size", "gradient_accumulation_steps")
    problems.add_if(
        samples % update != 0,
        f"{sampled} = {samples} samples per rank must be a multiple of {trained} = {update}",
    )
    longest = args.max_prompt_seq_len + args.max_answer_seq_len
    for name in ("max_tokens_per_micro_batch", "max_tokens_per_scoring_pass"):
        problems.add_if(
            0 < getattr(args, name) < longest,
            f"{given(name)} is less than the longest sequence, "
            f"{given('max_prompt_seq_len', 'max_answer_seq_len', by=' + ')}; raise it to at least {longest}",
        )
    problems.add_if(
        0 < args.correction_high <= args.correction_low,
        f"{given('correction_low')} is not below {given('correction_high')}; lower it",
    )
    problems.add_if(
        args.ref_ema_decay and args.offload_reference_model,
        f"--offload_reference_model has no effect with {given('ref_ema_decay')}: the averages are sharded "
        "over the ranks; leave it out",
    )
    problems.add_if(
        args.ref_ema_decay and args.teacher_model_name_or_path,
        f"{given('ref_ema_decay')} moves the reference, which --teacher_model_name_or_path replaces; "
        "leave it out",
    )
    problems.add_if(
        args.old_logprobs == "strict" and args.rollout_staleness != 0,
        "--old_logprobs strict compares the sampler with the policy before its update, which with "
        f"{given('rollout_staleness')} is a later one; use --old_logprobs auto, which recomputes them",
    )
    problems.add_if(
        args.offload_states_for_generation and effective_zero_stage(args.actor_zero_stage, dtype) == 0,
        "--offload_states_for_generation needs --actor_zero_stage 1, 2 or 3",
    )
    problems.add_if(
        args.offload_states_for_generation and args.offload in ("param", "all"),
        f"--offload_states_for_generation and --offload {args.offload} exclude each other, because the "
        "parameters are on the CPU already; use --offload none or optimizer",
    )
    size = given("inference_tp_size")
    is_cut = args.inference_tp_size > 1
    problems.add_if(not args.enable_hybrid_engine and is_cut, f"{size} needs --enable_hybrid_engine")
    divisors = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
    problems.add_if(
        num_ranks % args.inference_tp_size != 0,
        f"{size} does not divide the number of ranks, {num_ranks}; use {divisors}",
    )
    problems.add_if(
        is_cut and args.unpin_actor_parameters and args.actor_zero_stage == 3,
        f"{size} and --unpin_actor_parameters exclude each other: layers gathered one by one are "
        "not cut; give one of them",
    )
    merges = args.merge_adapters == "true" or args.actor_zero_stage == 3
    for is_inexact, what in (
        (is_cut, f"{size} adds parts of a product"),
        (args.actor_lora_dim > 0 and merges, "merged adapters (--merge_adapters true, ZeRO 3) are rounded"),
        (args.load_in_4bit, "--load_in_4bit multiplies in another way"),
    ):
        problems.add_if(args.exact and is_inexact, f"--exact: {what}; leave one of them out")


def check_evaluation(
    args: PPOArguments,
    options: DataOptions,
    rewards: list[RewardSpec],
    problems: Problems,
    tokenizer: Any = None,
) -> None:
    """Add the problems of the evaluation flags that can be found without data."""
    own = dataclasses.replace(options, data_path=args.eval_data_path, data_split="0,0,1", eval_fraction=0.0)
    for problem in check_sources(own, tokenizer) if args.eval_data_path else ():
        problems.add(problem.replace("--data_path", "--eval_data_path"))
    problems.add_if(
        args.eval_data_path and args.eval_fraction,
        f"--eval_fraction {args.eval_fraction} holds out prompts that are not used, because "
        "--eval_data_path is evaluated; give one of them",
    )
    known = ["eval/score", *(f"eval/score_{spec.name}" for spec in rewards if len(rewards) > 1)]
    known += ["eval/pass_rate"] if any(spec.kind in VERIFIABLE for spec in rewards) else []
    judges = [f"_{spec.name}" for spec in rewards if spec.kind == "judge"]
    # Only metrics of which higher is better.
    known += [f"eval/win_rate{name}{low}" for name in ("", *judges) for low in ("", "_low")]
    problems.add_if(
        args.keep_best and args.keep_best not in known,
        f"--keep_best {args.keep_best} is not a higher-is-better evaluation metric of this run; "
        f"choose from {', '.join(known)}",
    )
    problems.add_if(
        args.eval_prompts <= 0 and (args.keep_best or args.eval_interval),
        "--keep_best and --eval_interval need an evaluation, which --eval_prompts 0 turns off; raise it",
    )


def check_algorithm(args: PPOArguments, algorithm: Algorithm, problems: Problems) -> None:
    """Add the problems of flags that the algorithm requires or does not support."""
    name = f"--algorithm {algorithm.name}"
    rounds = args.dynamic_sampling_rounds
    compares_responses = {
        name: algorithm.needs_group,
        f"--adv_norm {args.adv_norm}": args.adv_norm.startswith("group"),
        "--whiten_scores group": args.whiten_scores == "group",
        f"--dynamic_sampling_rounds {rounds}": rounds > 0,
    }
    for flag, compares in compares_responses.items():
        problems.add_if(
            args.num_samples_per_prompt <= 1 and compares,
            f"{flag} compares the responses to one prompt: --num_samples_per_prompt "
            f"{args.num_samples_per_prompt} must be 2 or more",
        )
    problems.add_if(
        not args.critic_model_name_or_path and algorithm.needs_critic,
        f"{name} needs a critic: give --critic_model_name_or_path, the export/ folder of step 2",
    )
    problems.add_if(
        args.truncated == "bootstrap" and not algorithm.needs_critic,
        f"--truncated bootstrap requires a critic, which {name} does not have; use score or mask, or "
        "--truncated_score",
    )


def check_teacher(args: PPOArguments, algorithm: Algorithm, problems: Problems) -> None:
    """Add the problems of flags that require a teacher or do not support one."""
    name = f"--algorithm {algorithm.name}"
    teacher = args.teacher_model_name_or_path
    if not algorithm.needs_teacher:
        problems.add_if(
            teacher,
            f"--teacher_model_name_or_path {teacher} is unused: {name} has no teacher; use "
            "--algorithm distill",
        )
        return
    problems.add_if(not teacher, f"{name} learns from a teacher: give --teacher_model_name_or_path")
    problems.add_if(
        args.distill_loss != "sampled" and args.replay_sampling_support,
        f"--distill_loss {args.distill_loss} compares whole vocabularies, but --replay_sampling_support "
        "leaves tokens out; use --distill_loss sampled, or leave that flag out",
    )
    compared = {
        "--dynamic_sampling_rounds": args.dynamic_sampling_rounds > 0,
        "--keep_best": bool(args.keep_best),
    }
    has_rewards = bool(args.reward or args.environment or args.critic_model_name_or_path)
    for flag, compares in compared.items():
        problems.add_if(
            not has_rewards and compares,
            f"{flag} compares scores, and {name} has none without --reward; give one",
        )
    problems.add_if(
        args.num_samples_per_prompt <= 1 and has_rewards,
        f"{name} with rewards compares the responses to one prompt: --num_samples_per_prompt "
        f"{args.num_samples_per_prompt} must be 2 or more",
    )


def find_rewards(args: PPOArguments, algorithm: Algorithm | None, problems: Problems) -> list[RewardSpec]:
    """The rewards: --environment, --reward, or without them the reward model, by default the critic's model;
    [] if a teacher replaces them.
    """
    path = args.critic_model_name_or_path
    specs = check_rewards(args, problems) if args.reward else []
    if args.environment:
        specs.append(RewardSpec(KIND, args.environment, 1.0, KIND))
        with problems.catch():
            import_environment(args.environment)
        problems.add_if(
            args.replay_sampling_support,
            "--environment and --replay_sampling_support exclude each other: the tokens of an environment "
            "were not sampled; leave one of them out",
        )
    if args.reward or args.environment:
        return specs
    if not path and algorithm and algorithm.needs_teacher:
        return []
    if not path:
        problems.add(
            "there is no reward: give --reward, --environment, or a reward model as "
            "--critic_model_name_or_path"
        )
        return []
    return default_rewards(args)


def reward_warnings(args: PPOArguments, rewards: list[RewardSpec]) -> list[str]:
    """A warning for each reward model whose held-out accuracy may be too low, or that was trained on another
    conversation format.
    """
    lines = []
    for path in dict.fromkeys(spec.target for spec in rewards if spec.kind == "model"):
        metadata = read_metadata(path)
        figures = metadata.get("eval", {})
        template = metadata.get("template") or args.template
        if {"accuracy", "pairs"} <= figures.keys():
            rate = wilson_interval(figures["accuracy"] * figures["pairs"], figures["pairs"])
            if rate.low < MIN_REWARD_ACCURACY:
                lines.append(
                    f"the reward model {path} ranked {figures['accuracy']:.1%} of {figures['pairs']} "
                    f"held-out pairs correctly (95 % interval {rate.low:.1%} to {rate.high:.1%}), not "
                    f"significantly above {MIN_REWARD_ACCURACY:.0%}: its preferences may be noise"
                )
        if args.template not in ("", template):
            lines.append(
                f"the reward model {path} was trained with --template {template}, and scores dialogues of "
                f"--template {args.template}"
            )
    return lines


def check_models(args: PPOArguments, specs: list[RoleSpec], problems: Problems) -> Any:
    """Check the roles' models; return the actor's tokenizer, or None if it has a problem."""
    prompt, answer = args.max_prompt_seq_len, args.max_answer_seq_len
    lengths = f"--max_prompt_seq_len {prompt} + --max_answer_seq_len {answer}"
    scorers = {spec.path for spec in specs if spec.is_reward}
    # The first role of each model: by default the critic's is also the reward model.
    first = {(spec.path, spec.is_value_model): spec for spec in reversed(specs)}
    actor = None  # the actor's tokenizer
    for (path, is_value_model), spec in reversed(first.items()):
        flag = spec.flag
        config = model_checks.check_model(flag, path, args, problems, takes_adapter=True)
        if config is None:
            continue
        model_checks.check_family(flag, config, args, problems, is_ranker=is_value_model)
        model_checks.check_length(config, prompt + answer, f"{lengths} ({spec.label})", problems)
        has_adapters = spec.is_trained and (spec.flags.lora_dim > 0 or is_adapter(path))
        if is_adapter(path):
            with problems.catch():
                check_supported(path)
        elif has_adapters:
            model_checks.check_lora(f"{spec.name}_", config, spec.flags, args, problems)
        tokenizer = model_checks.check_tokenizer(flag, path, args, problems)
        lora_flag = f"--{spec.name}_lora_dim" if has_adapters else ""
        startup.print_note(
            *model_checks.check_new_tokens(flag, config, tokenizer, args, problems, lora_flag=lora_flag)
        )
        if spec.name == "actor":
            check_generation(args, config, problems)
            check_tensor_parallel(args, config, problems)
            actor = tokenizer
            continue
        with problems.catch():
            problems.add_if(
                path in scorers and not has_saved_head(path),  # a critic may start with a new head
                f"{flag} {path} is not a reward model (it has no score head); give the export/ of step 2, or "
                f"--reward classifier:{path} for a model of several labels",
            )
        difference = actor and tokenizer and vocabulary_difference(actor, tokenizer)
        if difference:
            cure = (
                "train the reward model from the same base, or give it as "
                f"--reward classifier:{path}, which reads text"
            )
            if not is_value_model:
                cure = "take both from one family of models"
            problems.add(
                f"--actor_model_name_or_path and {flag} have different vocabularies, but receive the same "
                f"token ids: {difference}; {cure}"
            )
    return actor


def check_generation(args: PPOArguments, config: Any, problems: Problems) -> None:
    """Add a problem if the actor's family does not generate correctly by the method of the flags."""
    probe = partial(why_not_generated, config, trusts_code=args.trust_remote_code)
    is_hybrid = args.enable_hybrid_engine
    reason = probe(by_transformers=not is_hybrid)
    if not reason:
        return
    cure = "give an actor of another family"
    if is_hybrid and not probe(by_transformers=True):
        cure = "leave --enable_hybrid_engine out: transformers' `generate`, which is slower, works"
    method = "--enable_hybrid_engine" if is_hybrid else "transformers' `generate`"
    problems.add(f"--actor_model_name_or_path {args.actor_model_name_or_path}: {method}: {reason}; {cure}")


def check_tensor_parallel(args: PPOArguments, config: Any, problems: Problems) -> None:
    """Add a problem if the hybrid engine cannot split an actor of this configuration."""
    tp_size = args.inference_tp_size
    if args.enable_hybrid_engine and tp_size > 1 and distributed.world_size() % tp_size == 0:
        # Without a plan, generation uses tensor-parallel size 1 and prints a note.
        with problems.catch(), contextlib.suppress(NoPlan):
            build_cuts(model_checks.empty_model(config, args), tp_size)
