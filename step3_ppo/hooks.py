"""Your own functions before and after each phase of a PPO step, registered by a module of `--plugins`:

    @register_hook("after_rollout")
    def halve_scores(trainer, batch):
        return batch.with_numbers("scores", batch.numbers("scores") / 2)

A hook gets the trainer and the batch, and may return another batch; None keeps it. Every rank runs it with
its own rows. A resumed run does not repeat the phases of a step that were finished: their effects are in the
saved batch.
"""

from collections.abc import Callable
from typing import Any

# Phase: the second argument of its hooks, before it; after it.
#   step        None; the rollout batch that was trained on
#   rollout     None; the rollout batch (step3_ppo/rollout_batch.py)
#   advantages  the rollout batch; the same with all inputs of the losses
#   update      list of the micro-batches of a minibatch; the same
PHASES = ("step", "rollout", "advantages", "update")
Hook = Callable[[Any, Any], Any]
HOOKS: dict[str, list[Hook]] = {f"{when}_{phase}": [] for phase in PHASES for when in ("before", "after")}


def register_hook(point: str) -> Callable[[Hook], Hook]:
    """Decorator that registers a function at this point, after those registered before.

    Raises ValueError for a key that is not in HOOKS.
    """
    if point not in HOOKS:
        raise ValueError(f"there is no hook {point!r}; choose from {', '.join(HOOKS)}")

    def register(hook: Hook) -> Hook:
        HOOKS[point].append(hook)
        return hook

    return register


def run_hooks(point: str, trainer: Any, batch: Any) -> Any:
    """Run the hooks of a point on a batch and return the batch. Every rank must call this."""
    for hook in HOOKS[point]:
        returned = hook(trainer, batch)
        batch = batch if returned is None else returned
    return batch
