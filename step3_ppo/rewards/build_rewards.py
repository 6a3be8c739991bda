"""From `--reward` to rewards: what can be checked before a model is loaded, and those that read text."""

from collections.abc import Callable
from typing import Any

from common.flags.access_token import client_token
from common.flags.args import Problems
from common.models.value_model import has_saved_head
from common.programs import startup
from common.ranks import distributed
from step3_ppo.rewards.classifier_reward import (
    ClassifierReward,
    label_index,
    load_classifier_config,
    load_classifier_tokenizer,
    split_label,
)
from step3_ppo.rewards.function_reward import FunctionReward, import_function, is_async
from step3_ppo.rewards.http_reward import HttpReward
from step3_ppo.rewards.reward_specs import RewardSpec, parse_reward, parse_rewards
from step3_ppo.rewards.text_rewards import Failures, TextReward


def check_rewards(args: Any, problems: Problems) -> list[RewardSpec]:
    """Return the rewards of `--reward` after adding what is wrong with them; no weights are loaded.

    A reward model's vocabulary is not looked at: who builds it compares it with the actor's.
    """
    good = [text for text in args.reward if _tell(problems, parse_reward, text)]
    if len(good) < len(args.reward):
        return []
    specs = _tell(problems, parse_rewards, good) or []
    checks = {"model": _check_model, "classifier": _check_classifier, "http": _check_http}
    for spec in specs:
        if spec.kind in checks:
            _tell(problems, checks[spec.kind], spec, args, problems)
    functions = [_tell(problems, import_function, s.target) for s in specs if s.kind == "function"]
    if args.reward_processes > 0 and all(f is not None and is_async(f) for f in functions):
        problems.add(
            f"--reward_processes {args.reward_processes} is for a plain function, and --reward names none; "
            "leave it out"
        )
    return specs


def build_text_reward(spec: RewardSpec, args: Any, failures: Failures | None = None) -> TextReward:
    """Return the reward of a spec that reads text; a reward model reads token ids and is not built here.

    Raises:
        ValueError: what `check_rewards` tells too.
    """
    limits = {"timeout_seconds": args.reward_timeout_seconds, "batch_size": args.reward_batch_size}
    limits["failures"] = failures
    if spec.kind == "function":
        return FunctionReward(spec.target, num_processes=args.reward_processes, **limits)
    if spec.kind == "http":
        return HttpReward(spec.target, **limits)
    assert spec.kind == "classifier", spec
    return ClassifierReward(
        spec.target,
        batch_size=args.reward_batch_size,
        device=distributed.device(),
        dtype=args.dtype or distributed.default_dtype_name(),
        trust_remote_code=args.trust_remote_code,
        failures=failures,
    )


def _tell(problems: Problems, check: Callable[..., Any], *inputs: Any) -> Any:
    """Return what the check returns, or None after adding the ValueError that it raises."""
    try:
        return check(*inputs)
    except ValueError as error:
        problems.add(str(error))
        return None


def _check_model(spec: RewardSpec, args: Any, problems: Problems) -> None:
    config = startup.check_model("--reward model:", spec.target, args, problems)
    if config and not has_saved_head(spec.target):
        raise ValueError(
            f"--reward {spec.text} is no reward model (it has no score head); give the export/ of step 2, or "
            "say classifier: for a model of several labels"
        )


def _check_classifier(spec: RewardSpec, args: Any, problems: Problems) -> None:
    config = load_classifier_config(spec.target, trust_remote_code=args.trust_remote_code)
    label_index(config, split_label(spec.target)[1], spec.target)
    load_classifier_tokenizer(spec.target, trust_remote_code=args.trust_remote_code)


def _check_http(spec: RewardSpec, args: Any, problems: Problems) -> None:
    client_token()
