"""Algorithms: plain functions that make advantages from an Experience. None of them knows an engine.

An algorithm is registered by name and called as `algorithm(experience, args, kl_coef) -> Experience`.
"""

from collections.abc import Callable

from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience

Algorithm = Callable[[Experience, PPOArguments, float], Experience]
ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(name: str) -> Callable[[Algorithm], Algorithm]:
    """Make `--algorithm name` call the decorated function."""

    def register(algorithm: Algorithm) -> Algorithm:
        ALGORITHMS[name] = algorithm
        return algorithm

    return register


from step3_ppo.algorithms import ppo  # noqa: E402, F401  (registers itself)
