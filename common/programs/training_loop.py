"""Code around every step's trainer: loads models from flags, runs the remaining steps, saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from common.models.attention import takes_packed
from common.models.loading import DTYPES, ModelOptions, load_causal_lm, plain_model
from common.models.lora import LoraOptions, add_lora
from common.models.model_flops import own_peak_flops
from common.models.policy_model import PolicyModel
from common.models.saved_adapters import POOLING
from common.models.value_model import ValueModel, load_value_model
from common.programs.startup import Start
from common.ranks import distributed
from common.ranks.failures import StepSkipped, TooManyBadSteps
from common.ranks.step_costs import COSTS
from common.runs.export import save_adapter, save_export
from common.runs.run import Run
from common.runs.run_logger import RunLogger

EVAL_STEP = "eval_step"  # metadata key of an export: the step of its held-out metrics


def load_policy(
    args: Any, ds_config: dict[str, Any], num_tokens: int, *, dropout: float | None, role: Any = None
) -> PolicyModel:
    """The chat model that an engine trains. Every rank must call this.

    `role` has the flags of the model: `args.actor` in step 3, else `args`.
    """
    role = role or args
    model = load_causal_lm(ModelOptions.of(args, role, ds_config, dropout=dropout), num_tokens)
    model = add_lora(model, LoraOptions.of(args, role), args.seed)
    return PolicyModel(model, num_valid_tokens=num_tokens, temperature=getattr(args, "temperature", 1.0))


def load_ranker(
    args: Any,
    ds_config: dict[str, Any],
    num_tokens: int,
    *,
    dropout: float | None,
    role: Any = None,
    owner: nn.Module | None = None,
) -> ValueModel:
    """The reward model or critic that an engine trains; see `load_policy` and `load_value_model`."""
    role = role or args
    options = ModelOptions.of(args, role, ds_config, dropout=dropout)
    lora = LoraOptions.of(args, role)
    pooling = getattr(args, POOLING, "")  # a flag of step 2
    return load_value_model(options, num_tokens, lora, seed=args.seed, owner=owner, pooling=pooling)


def count_steps(args: Any, steps_per_epoch: int) -> int:
    """Number of steps of the whole run: epochs, or fewer under --max_train_steps."""
    num_steps = args.num_train_epochs * steps_per_epoch
    return min(num_steps, args.max_train_steps) if args.max_train_steps else num_steps


def runs_packed(args: Any, model: nn.Module) -> bool:
    """Whether a PolicyModel or ValueModel runs packed sequences.

    Prints a note, once per kind of model, if it does not and padding costs something.
    """
    plain = plain_model(saved_model(model))
    is_packed = takes_packed(plain)
    shares_prompts = (
        not getattr(args, "no_share_prompts", True) and getattr(args, "num_samples_per_prompt", 2) > 1
    )
    if not is_packed and (args.packed or shares_prompts):
        kind = f"{plain.config.model_type} in {distributed.dtype_name(args.dtype)}"
        cost = "; each prompt is computed again for each of its responses" if shares_prompts else ""
        distributed.print_once(f"note: {kind} cannot run packed rows, so they are padded{cost}")
    return is_packed


def saved_model(model: nn.Module) -> nn.Module:
    """The transformers or PEFT model inside a PolicyModel or ValueModel."""
    return model.classifier if isinstance(model, ValueModel) else model.causal_lm


def run_steps(run: Run, train_step: Callable[[int], None], evaluate: Callable[[int], None]) -> None:
    """Run the remaining steps; before the first and after each, `evaluate` if that is due, and let the run
    save or stop. A run that was stopped in an evaluation resumes with it.

    Every rank must call this. Raises Stopped, and TooManyBadSteps with the state saved; also if no step
    changed the model.
    """
    while True:
        if run.evaluated_step < run.step:
            evaluate(run.step)
            run.evaluated_step = run.step
            run.checkpoint_if_due(run.step)
        if run.step >= run.logger.num_steps:
            break
        step = run.step + 1
        bad_step = None
        run.digests.begin(step)
        try:
            train_step(step)
        except StepSkipped as error:
            bad_step = error
        run.step = step
        run.digests.write(step)
        if bad_step:
            run.record_bad_step(step, bad_step)
    if not run.num_updates:
        raise TooManyBadSteps(
            f"none of the {run.step} steps changed the model, so nothing is exported; fix the problems "
            "named above, then start over with --resume overwrite"
        )


def save_model(start: Start, logger: RunLogger, module: nn.Module, metadata: dict[str, Any]) -> None:
    """Write OUTPUT_DIR/export and adapter of a PolicyModel or ValueModel. Every rank must call this."""
    folder = Path(start.args.output_dir)
    model = saved_model(module)
    is_ranker = isinstance(module, ValueModel)
    save_export(folder / "export", model, start.tokenizer, metadata=metadata, needs_own_pad=is_ranker)
    save_adapter(folder / "adapter", model, start.tokenizer, metadata=metadata)
    command = f"python chat.py {folder}/export"
    if is_ranker:
        command = f"python step2_reward/rw_eval.py --model_name_or_path {folder}/export --data_path PAIRS"
    logger.note(f"saved {folder}/export; try it: {command}; curves: {folder}/report.html")


def facts_at(step: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Metadata of an export at a step, without that of an evaluation before training."""
    is_whole = step == 0 or facts.get(EVAL_STEP) != 0
    return facts if is_whole else {name: x for name, x in facts.items() if not name.startswith("eval")}


def build_logger(args: Any, columns: tuple[str, ...], num_steps: int) -> RunLogger:
    """The run's logger; also measures the peak FLOP/s for perf/mfu. Every rank must call this."""
    COSTS.peak_flops = own_peak_flops(DTYPES[distributed.dtype_name(args.dtype)])
    return RunLogger(args, columns, num_steps)
