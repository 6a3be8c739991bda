#!/usr/bin/env python
"""Evaluates a reward model on any pairs: accuracy, margin, calibration, length bias.

python step2_reward/rw_eval.py --model_name_or_path OUT/export --data_path PAIRS

The evaluation split of a data set is used, or all of it if it has none. The last line printed is one JSON
object.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import begin_script
from step2_reward.arguments import RewardEvalArguments

if __name__ == "__main__":
    begin_script(RewardEvalArguments, __doc__)

import torch

from common.data.collators import collate_pairs
from common.data.data_options import DataOptions, check_sources
from common.data.global_batches import evaluation_batches
from common.data.stage_datasets import build_data
from common.flags.args import Problems, parse_args
from common.flags.plugins import import_plugins
from common.models.value_model import has_saved_head
from common.programs import conversation_form, model_checks, running, startup
from common.programs.reward_scorer import load_frozen_value_model
from common.ranks import distributed, watchdog
from common.runs.resume import resolve_dtype
from step2_reward.answer_scores import compute_pair_scores
from step2_reward.pair_trainer import evaluate_pairs


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, load, score, print. `argv` defaults to sys.argv[1:]."""
    problems = Problems()
    args = parse_args(RewardEvalArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    import_plugins(args.plugins, problems)
    name = args.model_name_or_path
    config = model_checks.check_model("--model_name_or_path", name, args, problems, takes_adapter=True)
    if config and not has_saved_head(name):
        problems.add(
            f"--model_name_or_path {name} has no trained score head; give the export/ folder of step 2"
        )
    tokenizer = config and model_checks.check_tokenizer("--model_name_or_path", name, args, problems)
    # All rows are evaluated: no shares for other steps, and no held-out fraction.
    options = DataOptions.of(args, 2, data_split="0,1,0", eval_fraction=0.0, num_stored_epochs=1)
    for problem in check_sources(options, tokenizer):
        problems.add(problem)
    template, notes = conversation_form.find_template("--model_name_or_path", name, args, tokenizer, problems)
    problems.exit_if_any()
    startup.print_notes(args, argv)
    startup.print_note(*notes, *resolve_dtype(args))
    distributed.start()
    with startup.as_problem(problems):
        data = build_data(options, template)
        model = load_frozen_value_model(name, tokenizer, args)
    rows = data.eval if len(data.eval) else data.train
    if distributed.is_main():
        print("\n".join(data.report.lines()))
    batches = evaluation_batches(rows, collate_pairs, rows_per_batch=args.per_device_eval_batch_size)
    with watchdog.phase("the evaluation"):
        figures = evaluate_pairs(lambda batch: compute_pair_scores(model, batch)[:2], batches)
    if distributed.is_main():
        _print_samples(model, [rows[i] for i in range(min(args.num_samples, len(rows)))], tokenizer)
        for metric, value in figures.items():
            print(f"{metric:>20}  {value:.4f}" if isinstance(value, float) else f"{metric:>20}  {value}")
        print(json.dumps(figures))


@torch.no_grad()
def _print_samples(model, rows: list[dict], tokenizer) -> None:
    if not rows:
        return
    scores = compute_pair_scores(model, collate_pairs(rows))
    for index, row in enumerate(rows):
        print(repr(tokenizer.decode(row["chosen_ids"][: row["chosen_response_start"]])))
        for kind, value in (("chosen", scores.chosen[index]), ("rejected", scores.rejected[index])):
            answer = tokenizer.decode(row[f"{kind}_ids"][row[f"{kind}_response_start"] :])
            print(f"  {kind:>8} {float(value):>8.3f}  {answer!r}")


if __name__ == "__main__":
    running.run_program(main)
