#!/usr/bin/env python
"""TRL's SFTTrainer as bench_train.py's peer: a "go" is a pass over the rows. Run by TRL 1.16's Python.

DIR/bin/python benchmarks/trl_sft_peer.py --rows ROWS.json [--batching grouped] [--batch_size 8]

`train()` runs once, with an epoch for every pass; a callback holds it between them. `seconds` is from "go" to
the end of the epoch: TRL's own batches, forward, backward, clipping and optimizer, without its start-up, logs
and checkpoints. An optimizer step is --batch_size * --accumulation rows; small batches are padded less
and attend less where all of a batch lies in one row. Ways of batching, with a loss on the response
tokens alone:
  padded        rows in random order, padded to the longest of the batch
  grouped       the same with transformers' group_by_length
  padding_free  the batch laid out as one row, a mask between its sequences
  bfd           packs of --pack_tokens, best fit decreasing; --batch_size counts packs, all in one row
  bfd_split     the same; a row that is longer than a pack would be split
  wrapped       one stream cut into packs: sequences see one another and are cut, so it is other work
Attention is torch's (sdpa): FlashAttention needs a GPU, and flex_attention has no backward pass on a CPU.
The answer: seconds, cpu_seconds, tokens (real ones of a pass), padded_tokens (computed ones), rows,
optimizer_steps, loss (mean of the optimizer steps).
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.peer_process import Turns

BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "padding_free": {"padding_free": True, "max_length": None},
    "bfd": {"packing": True, "packing_strategy": "bfd"},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split"},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
}


def training_options(output_dir: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of transformers' Trainer that make it train as we do and do nothing else."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "num_train_epochs": 10**6,  # the benchmark ends it
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": args.seed,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def build_passes(turns: Turns, epoch: dict[str, Any]) -> Any:
    """Return a callback that waits for a turn before each epoch and answers after it.

    `epoch` has what every pass is alike in; its `losses` (of micro-batches, to be summed) and `padded_tokens`
    grow.
    """
    from transformers import TrainerCallback

    class Passes(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.ready(**epoch["facts"])

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            epoch["losses"], epoch["padded_tokens"], self.first_step = [], 0, state.global_step
            turns.wait()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times = turns.times()
            num_steps = state.global_step - self.first_step
            turns.answer(
                **times,
                tokens=epoch["tokens"],
                padded_tokens=epoch["padded_tokens"],
                rows=epoch["rows"],
                optimizer_steps=num_steps,
                loss=sum(map(float, epoch["losses"])) / num_steps,
            )

    return Passes()


def watch_steps(trainer: Any, epoch: dict[str, Any]) -> None:
    """Let every training step of the trainer leave its loss and its number of ids in `epoch`."""
    training_step: Callable[..., Any] = trainer.training_step

    def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        epoch["padded_tokens"] += inputs["input_ids"].numel()
        loss = training_step(model, inputs, *args, **kwargs)
        epoch["losses"].append(loss)
        return loss

    trainer.training_step = watched


def score_labels_only() -> None:
    """Let TRL's output head score only positions with a label, as it does where it has Triton, on a GPU.

    On a CPU it scores prompts and padding too: a third of a step and more, which nobody pays on a GPU.
    """
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda device: True  # read for the choice of positions, not of the kernel


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this peer and the reward model's."""
    parser.add_argument("--rows", required=True, help="file of chat_rows.write_rows")
    parser.add_argument("--batch_size", type=int, default=8, help="rows, pairs or packs of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="model folder; empty: a random one of chat_rows' size")


def main() -> None:
    """Train, a pass for each turn."""
    turns = Turns()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_flags(parser)
    parser.add_argument("--batching", choices=BATCHINGS, default="padded")
    parser.add_argument("--pack_tokens", type=int, default=512, help="tokens of a pack")
    parser.add_argument("--labels_only", action="store_true", help=score_labels_only.__doc__.splitlines()[0])
    args = parser.parse_args()

    import torch
    import transformers
    import trl
    from datasets import Dataset

    from benchmarks.chat_rows import read_rows, small_llama_config
    from benchmarks.ppo_models import build_tokenizer

    if args.labels_only:
        score_labels_only()
    torch.manual_seed(args.seed)
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = transformers.LlamaForCausalLM(small_llama_config())
    rows = read_rows(args.rows)
    dataset = Dataset.from_list(
        [{"input_ids": row["input_ids"], "completion_mask": row["loss_mask"]} for row in rows]
    )
    options = {"max_length": args.pack_tokens, "completion_only_loss": True} | BATCHINGS[args.batching]
    epoch: dict[str, Any] = {"rows": len(rows), "tokens": sum(len(row["input_ids"]) for row in rows)}
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**training_options(output_dir, args), **options),
            train_dataset=dataset,
            processing_class=build_tokenizer(),
            callbacks=[build_passes(turns, epoch)],
        )
        kept = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
        if kept != epoch["tokens"]:
            raise ValueError(
                f"TRL keeps {kept} of {epoch['tokens']} tokens: --pack_tokens {args.pack_tokens} is short"
            )
        epoch["facts"] = {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "batching": args.batching,
            "batches": len(trainer.get_train_dataloader()),
            "labels_only": args.labels_only,
        }
        watch_steps(trainer, epoch)
        trainer.train()


if __name__ == "__main__":
    main()
