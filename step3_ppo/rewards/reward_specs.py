"""What `--reward` says: which rewards there are, how much each counts, what can be checked before a model is
loaded, and those that read text.

[WEIGHT*]model:PATH  [WEIGHT*]classifier:PATH[:LABEL]  [WEIGHT*]function:MODULE:NAME  [WEIGHT*]http://HOST:PORT/PATH
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from common.flags.access_token import client_token
from common.flags.args import Problems
from common.models.value_model import has_saved_head
from common.programs import startup
from common.ranks import distributed
from step3_ppo.rewards.classifier_reward import ClassifierReward, load_parts
from step3_ppo.rewards.function_reward import FunctionReward, import_function, is_async
from step3_ppo.rewards.http_reward import HttpReward
from step3_ppo.rewards.text_rewards import REFUSE, Failures, TextReward

FORMS = {
    "model": "model:PATH",
    "classifier": "classifier:PATH[:LABEL]",
    "function": "function:MODULE:NAME",
    "http": "http://HOST:PORT/PATH",
}
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `--reward`; `target` is what follows the kind, for http the whole address."""

    kind: str  # a key of FORMS
    target: str
    weight: float  # 0: its scores are logged and count nothing
    text: str  # as the user wrote it
    number: int = 1  # the how-manieth of this name

    @property
    def name(self) -> str:
        """Return the short name under which its scores are logged, such as `function_polite_2`."""
        base = f"function_{self.target.rpartition(':')[2]}" if self.kind == "function" else self.kind
        return base if self.number == 1 else f"{base}_{self.number}"


def parse_rewards(texts: Sequence[str]) -> list[RewardSpec]:
    """Return the rewards that `--reward` names, each under a name of its own; [] for none.

    Raises:
        ValueError: an entry is of no known form (see `parse_reward`), or nothing has a weight.
    """
    specs: list[RewardSpec] = []
    for text in texts:
        spec, taken = parse_reward(text), {spec.name for spec in specs}
        while spec.name in taken:
            spec = dataclasses.replace(spec, number=spec.number + 1)
        specs.append(spec)
    if specs and not any(spec.weight for spec in specs):
        raise ValueError(
            f"--reward {' '.join(texts)}: every weight is 0, so there is nothing to learn from; give one of "
            "them a weight, such as 1*"
        )
    return specs


def parse_reward(text: str) -> RewardSpec:
    """Return what one entry of `--reward` says; its weight is 1 where it names none.

    Raises:
        ValueError: unknown kind (the nearest is named), a weight that is no number, nothing behind the kind.
    """
    head, colon, target = text.strip().partition(":")
    weight_text, star, kind = head.rpartition("*")  # a * behind the kind belongs to a path
    kind, target = kind.strip(), target.strip()
    if kind in ("http", "https"):
        kind, target = "http", f"{kind}:{target}"
    if kind not in FORMS or not colon:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f"did you mean {FORMS[near[0]]}?" if near else f"use one of {', '.join(FORMS.values())}"
        raise ValueError(f"--reward {text}: {kind!r} is no kind of reward; {hint}")
    try:
        weight = float(weight_text) if star else 1.0
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(
            f"--reward {text}: the weight {weight_text!r} is no number; write it as in 0.5*model:PATH, or "
            "leave it out for 1"
        )
    _check_target(text, kind, target)
    return RewardSpec(kind, target, weight, text)


def _check_target(text: str, kind: str, target: str) -> None:
    if kind == "http":
        _, at, host = target.partition("//")[2].partition("/")[0].rpartition("@")
        if at:
            raise ValueError(
                f"--reward http://...@{host}: a name or password in the address would stand in args.json and "
                "in messages; leave it out and set TRIPTYCH_REWARD_TOKEN"
            )
        try:
            is_good = bool(urlsplit(target).hostname) and urlsplit(target).port != 0
        except ValueError:  # a port that is no number
            is_good = False
        what = "no address"
    elif kind == "function":
        is_good, what = bool(_FUNCTION.fullmatch(target)), "no function of a module"
    else:
        is_good, what = bool(target.partition(":")[0]), "no path"
    if not is_good:
        raise ValueError(f"--reward {text}: {target!r} is {what}; write {FORMS[kind]}")


def check_rewards(args: Any, problems: Problems) -> list[RewardSpec]:
    """Return the rewards of `--reward` after adding what is wrong with them; no weights are loaded.

    A reward model's vocabulary is not looked at: who builds it compares it with the actor's.
    """
    good = [text for text in args.reward if _tell(problems, parse_reward, text)]
    if len(good) < len(args.reward):
        return []
    specs = _tell(problems, parse_rewards, good) or []
    kinds = [_tell(problems, _check, spec, args, problems) for spec in specs]
    if args.reward_processes > 0 and "plain function" not in kinds:
        problems.add(
            f"--reward_processes {args.reward_processes} is for a plain function, and --reward names none; "
            "leave it out"
        )
    return specs


def build_text_reward(spec: RewardSpec, args: Any, failures: Failures = REFUSE) -> TextReward:
    """Return the reward of a spec that reads text; a reward model reads token ids and is not built here.

    Raises:
        ValueError: what `check_rewards` tells too.
    """
    options = {"batch_size": args.reward_batch_size, "failures": failures}
    if spec.kind == "classifier":
        dtype, device = distributed.dtype_name(args.dtype), distributed.device()
        trust = args.trust_remote_code
        return ClassifierReward(spec.target, device=device, dtype=dtype, trust_remote_code=trust, **options)
    options["timeout_seconds"] = args.reward_timeout_seconds
    if spec.kind == "function":
        return FunctionReward(spec.target, num_processes=args.reward_processes, **options)
    return HttpReward(spec.target, **options)


def _tell(problems: Problems, check: Callable[..., Any], *inputs: Any) -> Any:
    """Return what the check returns, or None after adding the ValueError that it raises."""
    try:
        return check(*inputs)
    except ValueError as error:
        problems.add(str(error))
        return None


def _check(spec: RewardSpec, args: Any, problems: Problems) -> str:
    """Return a reward's kind, after adding what is wrong with it. Raises ValueError."""
    if spec.kind == "function":
        return "async function" if is_async(import_function(spec.target)) else "plain function"
    if spec.kind == "http":
        client_token()
    elif spec.kind == "classifier":
        load_parts(spec.target, trust_remote_code=args.trust_remote_code)
    else:
        config = startup.check_model("--reward model:", spec.target, args, problems)
        if config and not has_saved_head(spec.target):
            raise ValueError(
                f"--reward {spec.text} is no reward model (it has no score head); give the export/ of step "
                "2, or say classifier: for a model of several labels"
            )
    return spec.kind
