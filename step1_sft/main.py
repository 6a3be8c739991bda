#!/usr/bin/env python
"""Step 1, supervised fine-tuning: trains a base model on responses.

deepspeed --num_gpus 2 step1_sft/main.py --model_name_or_path MODEL --data_path FILE --output_dir OUT
python step1_sft/main.py --model_name_or_path MODEL --data_path FILE --output_dir OUT     (one process)

OUT/export loads with AutoModelForCausalLM.from_pretrained.
--help lists the usual flags, --help_all all of them, --dry_run checks them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import begin_script
from common.programs.memory_check import begin_plan
from step1_sft.arguments import SFTArguments

if __name__ == "__main__":
    begin_script(SFTArguments, __doc__)
    begin_plan(1)

from common.data.collators import collate_sft
from common.data.global_batches import Groups
from common.data.tokenizer import num_token_ids
from common.programs import running, single_model, startup, training_loop
from common.ranks import watchdog
from common.runs.run_files import RunResult, read_result
from step1_sft.sft_trainer import SFTTrainer


def main(argv: Sequence[str] | None = None) -> RunResult | None:
    """Check the flags, load, train, evaluate, export; return the outcome of a finished run.

    `argv` defaults to sys.argv[1:].
    """
    start, data = single_model.begin(SFTArguments, 1, __doc__.splitlines()[0], argv)
    if data is None:
        return read_result(start.args.output_dir)
    args = start.args
    with startup.as_problem(start.problems):
        groups = Groups(data.train.numbers("conversation"), sources=data.sources)
        lengths = [data.train.lengths("input_ids")]
        rows = single_model.TrainingRows(args, data.train, collate_sft, lengths, groups)
    num_steps = training_loop.count_steps(args, len(rows.order))
    with startup.as_problem(start.problems), watchdog.phase("the loading of the model"):
        num_tokens = num_token_ids(start.tokenizer)
        model = training_loop.load_policy(args, start.ds_config, num_tokens, dropout=args.dropout)
        trainer = single_model.build_trainer(SFTTrainer, start, model, num_steps)
    return single_model.train(start, data, rows, trainer, data.eval)


if __name__ == "__main__":
    running.run_program(main)
