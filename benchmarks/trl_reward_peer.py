#!/usr/bin/env python
"""TRL's RewardTrainer as bench_train.py's peer: a "go" is a pass over the pairs. Run by TRL 1.16's Python.

DIR/bin/python benchmarks/trl_reward_peer.py --rows PAIRS.json [--batching grouped] [--batch_size 8]

It has neither packing nor padding_free: chosen and rejected rows of a batch go through the model padded to
the longest of them, and the score is read at the last token. `grouped` adds transformers' group_by_length, by
the longer of a pair. Timing and answer are those of trl_sft_peer.py; `rows` counts pairs, `tokens` those of
both rows.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.peer_process import Turns
from benchmarks.trl_sft_peer import add_common_flags, build_passes, training_options, watch_steps


def main() -> None:
    """Train, a pass for each turn."""
    turns = Turns()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_flags(parser)
    parser.add_argument("--batching", choices=("padded", "grouped"), default="padded")
    args = parser.parse_args()

    import torch
    import transformers
    import trl
    from datasets import Dataset

    from benchmarks.chat_rows import read_rows, small_llama_config
    from benchmarks.ppo_models import build_tokenizer

    torch.manual_seed(args.seed)
    if args.model:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=1, dtype=torch.float32
        )
    else:
        model = transformers.LlamaForSequenceClassification(small_llama_config(num_labels=1))
    rows = read_rows(args.rows)
    sides = ("chosen_ids", "rejected_ids")
    lengths = [[len(row[side]) for side in sides] for row in rows]
    dataset = Dataset.from_list(
        [
            {side: row[side] for side in sides} | {"length": max(pair)}
            for row, pair in zip(rows, lengths, strict=True)
        ]
    )
    epoch: dict[str, Any] = {"rows": len(rows), "tokens": sum(map(sum, lengths))}
    sampling = {"train_sampling_strategy": "group_by_length"} if args.batching == "grouped" else {}
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = trl.RewardTrainer(
            model=model,
            args=trl.RewardConfig(
                **training_options(output_dir, args),
                **sampling,
                max_length=None,
                remove_unused_columns=False,  # the sampler reads `length`; the collator takes what it needs
            ),
            train_dataset=dataset,
            processing_class=build_tokenizer(),
            callbacks=[build_passes(turns, epoch)],
        )
        epoch["facts"] = {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "batching": args.batching,
            "batches": len(trainer.get_train_dataloader()),
        }
        watch_steps(trainer, epoch)
        trainer.train()


if __name__ == "__main__":
    main()
