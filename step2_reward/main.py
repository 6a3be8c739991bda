#!/usr/bin/env python
"""Step 2, reward modelling: trains a model to predict which of two responses people prefer.

With --loss dpo, ipo or kto a chat model is trained on the preferences instead, and there is no step 3.

deepspeed --num_gpus 2 step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT
python step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT     (one process)

OUT/export loads with AutoModelForSequenceClassification.from_pretrained, which scores at the last token
regardless of --reward_pooling; after --loss dpo, ipo and kto with AutoModelForCausalLM.from_pretrained.
--help lists the usual flags, --help_all all of them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import begin_script
from common.programs.memory_check import begin_plan
from step2_reward.arguments import RewardArguments

if __name__ == "__main__":
    begin_script(RewardArguments, __doc__)
    begin_plan(2)

from common.data.collators import collate_pairs
from common.data.global_batches import Groups
from common.data.tokenizer import num_token_ids
from common.flags.args import Problems
from common.models.saved_adapters import POOLING
from common.programs import running, single_model, startup, training_loop
from common.ranks import watchdog
from common.runs.run_files import RunResult, read_result
from step2_reward.answer_scores import shared_length
from step2_reward.kto_trainer import KTOTrainer, MismatchedRows
from step2_reward.pair_trainer import DPOTrainer, RewardTrainer
from step2_reward.reference import Reference


def check_pooling(config: Any, args: RewardArguments, problems: Problems) -> None:
    """Add a problem if --reward_pooling does not fit the loss or the model's own score head."""
    problems.add_if(
        args.reward_pooling != "last" and args.loss == "token_wise",
        "--reward_pooling mean: --loss token_wise compares responses value by value and trains no mean; use "
        "--loss end_score",
    )
    recorded = getattr(config, POOLING, "last")
    problems.add_if(
        args.kind == "reward" and recorded not in ("last", args.reward_pooling),
        f"--reward_pooling {args.reward_pooling}: {args.model_name_or_path} is a reward model whose head was "
        f"trained for the {recorded}; give --reward_pooling {recorded}",
    )


def main(argv: Sequence[str] | None = None) -> RunResult | None:
    """Check the flags, load, train, evaluate, export; return the outcome of a finished run.

    `argv` defaults to sys.argv[1:].
    """
    start, data = single_model.begin(RewardArguments, 2, __doc__.splitlines()[0], argv, check_pooling)
    if data is None:
        return read_result(start.args.output_dir)
    args = start.args
    kind = {"dpo": DPOTrainer, "kto": KTOTrainer, "reward": RewardTrainer}[args.kind]
    is_policy = kind is not RewardTrainer
    with startup.as_problem(start.problems):
        train = data.train
        held_out = data.eval
        shared = None
        numbers: Any = range(len(train))
        if args.is_unpaired:
            train, held_out = (MismatchedRows(rows, args.max_seq_len) for rows in (train, held_out))
        else:
            numbers = train.numbers("prompt_index")
            shared = None if args.no_share_prompts else shared_length
        groups = Groups(numbers, args.max_pairs_per_prompt, data.sources)
        reference = None
        if is_policy:
            reference = Reference(train, held_out)
            train, held_out = reference.pairs.values()
        lengths = [train.lengths(f"{side}_ids") for side in kind.trained_sides]
        rows = single_model.TrainingRows(args, train, collate_pairs, lengths, groups, shared)
    num_steps = training_loop.count_steps(args, len(rows.order))
    with startup.as_problem(start.problems), watchdog.phase("the loading of the model"):
        load = training_loop.load_policy if is_policy else training_loop.load_ranker
        # Dropout is off by default: a score that changes between passes cannot rank responses, and a policy
        # would differ from its reference before training.
        model = load(args, start.ds_config, num_token_ids(start.tokenizer), dropout=args.dropout or 0.0)
        trainer = single_model.build_trainer(kind, start, model, num_steps)
    return single_model.train(start, data, rows, trainer, held_out, reference)


if __name__ == "__main__":
    running.run_program(main)
