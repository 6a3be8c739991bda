"""Algorithms: plain functions that make advantages from an Experience. None of them knows an engine.

An algorithm is called as `add_advantages(experience, args, kl_coef) -> Experience` and registered by name,
with what it needs and what it usually does:

    @register_algorithm("mine", ignores=("gae_lambda",))
    def add_advantages(experience, args, kl_coef):
        ...
        return dataclasses.replace(experience, rewards=rewards, advantages=advantages)
"""

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass

from common.data.plugins import get_from, import_own_module
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience

AddAdvantages = Callable[[Experience, PPOArguments, float], Experience]


@dataclass(frozen=True)
class Algorithm:
    """How advantages are made, and the defaults of the flags that are empty."""

    name: str
    add_advantages: AddAdvantages
    needs_critic: bool = False  # its experience has old_values, and it fills in returns
    needs_group: bool = False  # compares responses to one prompt: --num_samples_per_prompt above 1
    kl_in: str = "reward"
    adv_norm: str = "none"
    loss_aggregation: str = "token"
    ignores: tuple[str, ...] = ()  # flags that it does not read


ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(name: str, **traits: object) -> Callable[[AddAdvantages], AddAdvantages]:
    """Make `--algorithm name` call the decorated function; `traits` are the other fields of `Algorithm`.

    Raises ValueError when another function has the name already.
    """

    def register(add_advantages: AddAdvantages) -> AddAdvantages:
        known = ALGORITHMS.get(name)
        if known and _place_of(known.add_advantages) != _place_of(add_advantages):
            raise ValueError(f"algorithm {name!r} is registered twice")
        ALGORITHMS[name] = Algorithm(name, add_advantages, **traits)  # type: ignore[arg-type]
        return add_advantages

    return register


def _place_of(function: AddAdvantages) -> tuple[str, str]:
    """Return what stays the same when a module is imported again."""
    return function.__module__, function.__qualname__


def find_algorithm(name: str) -> Algorithm:
    """Return what `--algorithm` names: a registered name, or MODULE:FUNCTION, which is imported.

    A function that its module registers comes with its traits; a plain one has the defaults of `Algorithm`.

    Raises ValueError for anything else; the message names the nearest algorithm, or why the import failed.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(sorted(ALGORITHMS))
        raise ValueError(f"--algorithm {name} is unknown{hint} (known: {known}; or MODULE:FUNCTION)")
    try:
        function = get_from(import_own_module(module_name), function_name)
    except ImportError as error:
        raise ValueError(f"--algorithm {name}: {error}") from error
    if not callable(function):
        raise ValueError(f"--algorithm {name}: {function_name} is no function; name one")
    registered = (known for known in ALGORITHMS.values() if known.add_advantages is function)
    return next(registered, None) or Algorithm(name, function)


def fill_defaults(args: PPOArguments, algorithm: Algorithm) -> PPOArguments:
    """Return `args` with the flags that are empty, and mean "as the algorithm does", filled in."""
    kl_in = args.kl_in or algorithm.kl_in
    return dataclasses.replace(
        args,
        kl_in=kl_in,
        kl_estimator=args.kl_estimator or {"reward": "k1", "loss": "k3"}[kl_in],
        adv_norm=args.adv_norm or algorithm.adv_norm,
        loss_aggregation=args.loss_aggregation or algorithm.loss_aggregation,
    )


def unused_flags(algorithm: Algorithm, given: set[str]) -> list[str]:
    """Return those of the given flags, names without dashes, that the algorithm does not read, sorted."""
    unused = set(algorithm.ignores)
    if not algorithm.needs_critic:
        unused |= {name for name in given if name.startswith(("critic_", "value_")) or name == "gae_lambda"}
        # Reward models are sharded like the critic; without --reward it is the one that scores.
        unused -= {"critic_zero_stage"}
        if "reward" not in given:
            unused -= {"critic_model_name_or_path"}
    return sorted(unused & given)


from step3_ppo.algorithms import grpo, ppo, reinforce_plus_plus, rloo  # noqa: E402, F401  (register themselves)
