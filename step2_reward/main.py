#!/usr/bin/env python
"""Step 2, reward modelling: a model learns which of two answers people prefer.

With --loss dpo a chat model learns it instead, and there is no step 3.

deepspeed --num_gpus 2 step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT
python step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT     (one process)

OUT/export loads with AutoModelForSequenceClassification.from_pretrained, after --loss dpo with
AutoModelForCausalLM.from_pretrained. --help lists the flags.
"""

import sys
from pathlib import Path
from typing import Any

from torch import nn

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.data.global_batches import GlobalBatches
from common.data.packed_batch import collate_pairs
from common.data.stage_datasets import build_data
from common.engine.ds_config import build_engine
from common.programs import startup, training_loop
from common.ranks import watchdog
from step2_reward.arguments import RewardArguments
from step2_reward.dpo_trainer import DPOTrainer
from step2_reward.reference_logprobs import ReferencePairs, ReferencePart
from step2_reward.reward_trainer import RewardTrainer

COLUMNS = ("loss", "accuracy", "margin", "learning_rate")


def pair_lengths(table: Any) -> list[tuple[int, int]]:
    """Return the tokens of each pair's two answers, prompt included."""
    chosen, rejected = table.lengths("chosen_ids"), table.lengths("rejected_ids")
    return list(zip(chosen.tolist(), rejected.tolist(), strict=True))


def build_trainer(
    args: RewardArguments, num_tokens: int, ds_config: dict, batches: GlobalBatches, num_steps: int
) -> tuple[RewardTrainer | DPOTrainer, nn.Module]:
    """Return what trains a reward model, or under --loss dpo a policy, and what of it is exported.

    Every rank must call this.
    """
    kind = "dpo" if args.loss == "dpo" else "reward"
    load = training_loop.load_policy if kind == "dpo" else training_loop.load_ranker
    # Dropout is off unless asked for: a score that changes from one pass to the next cannot be ranked by, and
    # a policy would differ from its reference before anything is learned.
    model = load(args, ds_config, num_tokens, dropout=args.dropout or 0.0)
    engine = build_engine(model, ds_config, args, num_steps)
    exported = model.causal_lm if kind == "dpo" else model.classifier
    columns = (*(f"{kind}/{name}" for name in COLUMNS), "perf/tokens_per_second")
    shared = {
        "is_packed": training_loop.use_layout(batches, exported, args),
        "logger": training_loop.build_logger(args, columns, num_steps),
    }
    if kind == "dpo":
        return DPOTrainer(engine, beta=args.beta, label_smoothing=args.label_smoothing, **shared), exported
    ranking = {"rank_loss": args.loss, "use_margin": args.use_margin, "center_coef": args.center_coef}
    return RewardTrainer(engine, **ranking, **shared), exported


@watchdog.phase("the reference's log-probabilities")
def find_reference(
    args: RewardArguments,
    trainer: DPOTrainer,
    batches: GlobalBatches,
    held_out: ReferencePairs,
    num_steps: int,
    *,
    may_compute: bool,
) -> None:
    """Ask the policy, before its first step, about the pairs that the run will see.

    Every rank must call this. Raises ValueError when a resumed run needs more of them than it began with.
    """
    rows = batches.rows_until(num_steps)
    missing = [row for row in rows if batches.dataset.logprobs[row].isnan().any()]
    if missing and not may_compute:
        raise ValueError(
            f"--max_train_steps {args.max_train_steps}: {len(missing)} more pairs need the reference's "
            "log-probabilities, and the model that gave them has moved on; begin anew with --resume overwrite"
        )
    size, score = args.per_device_eval_batch_size, trainer.score_reference
    batches.dataset.compute(score, batches.collate, missing, size)
    if may_compute:
        held_out.compute(score, batches.collate, range(len(held_out)), size)


def main() -> None:
    """Check everything, load, train, evaluate, export."""
    start = training_loop.begin(RewardArguments, 2, __doc__.splitlines()[0])
    if start is None:
        return
    args, is_dpo = start.args, start.args.loss == "dpo"
    with startup.as_problem(start.problems), watchdog.phase("the preparation of the data"):
        data = build_data(start.options, start.template)
        train, held_out = (ReferencePairs(pairs) if is_dpo else pairs for pairs in (data.train, data.eval))
        batches = training_loop.build_global_batches(
            args, train, collate_pairs, lambda: pair_lengths(data.train)
        )
    num_steps = training_loop.count_steps(args, len(batches))
    with startup.as_problem(start.problems), watchdog.phase("the loading of the model"):
        trainer, model = build_trainer(args, len(start.tokenizer), start.ds_config, batches, num_steps)

    def prepare(step: int) -> None:
        if is_dpo:
            find_reference(args, trainer, batches, held_out, num_steps, may_compute=step == 0)

    parts = {"reference": ReferencePart({"train": train, "eval": held_out})} if is_dpo else {}
    run = training_loop.train(
        start, data, batches, trainer, parts, held_out=held_out, fact="eval", prepare=prepare
    )
    training_loop.export(start, run, model, "dpo" if is_dpo else "reward")


if __name__ == "__main__":
    startup.run_program(main)
