"""Parsing and validation of `--reward`, and the construction of rewards that read text.

[WEIGHT*]model:PATH  [WEIGHT*]classifier:PATH[:LABEL]  [WEIGHT*]function:MODULE:NAME  [WEIGHT*]http://HOST:PORT/PATH
[WEIGHT*]judge:URL[:MODEL][#TEMPLATE_FILE]  NUMBER
"""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from common.flags.access_token import CLIENT_VARIABLE, JUDGE_VARIABLE, client_token, judge_token
from common.flags.args import Problems
from step3_ppo.rewards.classifier_reward import ClassifierReward, load_parts
from step3_ppo.rewards.function_reward import FunctionReward, import_function
from step3_ppo.rewards.http_reward import HttpReward
from step3_ppo.rewards.judge_reward import JudgeReward, read_template, split_target
from step3_ppo.rewards.text_rewards import TextReward, read_number

FORMS = {
    "model": "model:PATH",
    "classifier": "classifier:PATH[:LABEL]",
    "function": "function:MODULE:NAME",
    "http": "http://HOST:PORT/PATH",
    "judge": "judge:URL[:MODEL][#TEMPLATE_FILE]",
}


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `--reward`; `target` is the part after the kind, for http the whole address."""

    kind: str  # a key of FORMS
    target: str
    weight: float  # 0: its scores are only logged
    name: str  # log name of its scores, such as `function_polite_2`


def parse_rewards(texts: Sequence[str], *, has_teacher: bool = False) -> list[RewardSpec]:
    """The rewards in `--reward`, with unique names; [] without any. Constants are not included.

    Raises ValueError if an entry is invalid (see `parse_reward`), or if no reward has a weight and there is
    no teacher.
    """
    specs: list[RewardSpec] = []
    for text in (text for text in texts if read_number(text) is None):
        specs.append(parse_reward(text, {spec.name for spec in specs}))
    if texts and not has_teacher and not any(spec.weight for spec in specs):
        raise ValueError(
            f"--reward {' '.join(texts)}: every weight is 0, so there is no score; give one of "
            "them a weight, such as 1*"
        )
    return specs


def reward_bias(texts: Sequence[str]) -> float:
    """Sum of the constants in `--reward`, which is added to every score."""
    return math.fsum(number for text in texts if (number := read_number(text)) is not None)


def parse_reward(text: str, taken: set[str]) -> RewardSpec:
    """Parse one entry of `--reward`, under a name that is not in `taken`; the weight is 1 by default.

    Raises ValueError for an unknown kind (the nearest is named), a weight that is not a number, an empty
    target, or a judge without an address.
    """
    head, _, target = text.strip().partition(":")
    weight_text, star, kind = head.rpartition("*")  # a * after the kind belongs to a path
    kind = kind.strip()
    target = target.strip()
    if kind in ("http", "https"):
        kind, target = "http", f"{kind}:{target}"
    if kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f"did you mean {FORMS[near[0]]}?" if near else f"use one of {', '.join(FORMS.values())}"
        raise ValueError(f"--reward {text}: {kind!r} is not a kind of reward; {hint}")
    weight = read_number(weight_text) if star else 1.0
    if weight is None:
        raise ValueError(
            f"--reward {text}: the weight {weight_text!r} is not a number; write it as in 0.5*model:PATH, or "
            "leave it out for 1"
        )
    _, at, host = target.partition("//")[2].partition("/")[0].rpartition("@")
    if kind in ("http", "judge") and at:
        variable = CLIENT_VARIABLE if kind == "http" else JUDGE_VARIABLE
        raise ValueError(
            f"--reward {kind}:...@{host}: a name or password in the address would be written to args.json "
            f"and to messages; leave it out and set {variable}"
        )
    if not _is_valid_target(kind, target):
        raise ValueError(f"--reward {text}: {target!r} names nothing; write {FORMS[kind]}")
    base = f"function_{target.rpartition(':')[2]}" if kind == "function" else kind
    name = base
    number = 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return RewardSpec(kind, target, weight, name)


def _is_valid_target(kind: str, target: str) -> bool:
    if kind == "function":
        return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", target))
    if kind not in ("http", "judge"):
        return bool(target.partition(":")[0])
    target = split_target(target)[0] if kind == "judge" else target
    try:
        return bool(urlsplit(target).hostname) and urlsplit(target).port != 0
    except ValueError:  # a port that is not a number
        return False


def check_rewards(args: Any, problems: Problems) -> list[RewardSpec]:
    """The rewards of `--reward`, after adding their problems; loads no weights.

    Reward models are checked with the other models.
    """
    specs: list[RewardSpec] = []
    with problems.catch():
        specs = parse_rewards(args.reward, has_teacher=bool(args.teacher_model_name_or_path))
    for spec in specs:
        with problems.catch():
            if spec.kind == "function":
                import_function(spec.target)
            elif spec.kind == "http":
                client_token()
            elif spec.kind == "judge":
                judge_token()
                read_template(split_target(spec.target)[2])
            elif spec.kind == "classifier":
                load_parts(spec.target, trust_remote_code=args.trust_remote_code)
    if args.reward_processes > 0 and not any(spec.kind == "function" for spec in specs):
        problems.add(
            f"--reward_processes {args.reward_processes} is for reward functions, but --reward names none; "
            "leave it out"
        )
    return specs


def build_text_reward(spec: RewardSpec, args: Any) -> TextReward:
    """The reward of a spec that reads text; reward models read token ids and are not built here.

    Raises ValueError as `check_rewards`.
    """
    kinds = {
        "classifier": ClassifierReward,
        "function": FunctionReward,
        "http": HttpReward,
        "judge": JudgeReward,
    }
    return kinds[spec.kind](spec.target, args)
