#!/usr/bin/env python
"""Training: tokens per second of SFT, reward modelling and DPO, padded and packed, compared with TRL.

python benchmarks/bench_train.py --trl_python DIR/bin/python [--model smollm2] [--dtype bf16] [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.16 DIR`. Every way trains the same random Llama (4
layers, hidden 256, vocabulary 8192, fp32; with --model smollm2, the default on a GPU, SmolLM2-135M's shape;
on a CPU a tenth of the rows, ours packed only, TRL not with 16 at once) on the same rows with the lengths of
a chat data set (workload.py), 16 rows per optimizer step, with AdamW, clipping and a loss on response tokens
only; one turn is one pass over the rows, and all take turns in one run. Padding is not counted as tokens.

  sft     ours padded and packed; TRL's SFTTrainer padded (16 rows at once, and one by one with accumulation),
          padding_free, and packed (best fit decreasing)
  reward  ours padded and packed; TRL's RewardTrainer padded, both ways, and grouped by length (no packing)
  dpo     the same of TRL's DPOTrainer (its padding_free pads); each side evaluates the reference first

Ours padded is for models whose layers do not support packing. The last line is a JSON object; `ratio` is
SFT's: our best over TRL's best as it is shipped; `ratios` are all of them. `labels only` is TRL with its
output head as on a GPU, where it skips positions without a label.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch

from benchmarks import workload
from benchmarks.measuring import (
    PeakShares,
    Peer,
    best,
    in_new_process,
    print_rates,
    print_result,
    read_args,
    take_turns,
)
from common.data.collators import collate_pairs, collate_sft
from common.data.global_batches import GlobalBatches
from common.engine.ds_config import config_of
from common.programs import single_model, training_loop
from common.programs.startup import Start
from step1_sft.arguments import SFTArguments
from step1_sft.sft_trainer import SFTTrainer
from step2_reward.answer_scores import shared_length
from step2_reward.arguments import RewardArguments
from step2_reward.kto_trainer import KTOTrainer
from step2_reward.pair_trainer import DPOTrainer, RewardTrainer

MAX_SEQ_LEN, ROWS_PER_STEP = 512, 16
# Ways of TRL by section. An optimizer step has 16 rows, or 4 packs of 512 tokens; on a CPU, smaller
# micro-batches with accumulation are how a user of TRL can reduce padding.
BEST_FIT = {"packing": True, "packing_strategy": "bfd"}  # best fit decreasing; batch_size counts packs
ONE_ROW = {"padding_free": True, "max_length": None}  # sequences of a batch in one row, masked
PACKS = {"options": BEST_FIT, "batch_size": 1, "accumulation": 4}
PAIR_WAYS = {
    "trl, padded": {"batch_size": 16},
    "trl, padded, accumulating": {"batch_size": 1, "accumulation": 16},
    "trl, grouped, accumulating": {
        "options": {"train_sampling_strategy": "group_by_length"},
        "batch_size": 2,
        "accumulation": 8,
    },
}
TRL_WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "trl, padded": {"batch_size": 16},
        "trl, padded, accumulating": {"batch_size": 1, "accumulation": 16},
        "trl, padding_free": {"options": ONE_ROW, "batch_size": 4, "accumulation": 4},
        "trl, packed": PACKS,
        "packed, labels only": PACKS | {"labels_only": True},
    },
    "reward": PAIR_WAYS,
    "dpo": PAIR_WAYS
    | {"accumulating, labels only": PAIR_WAYS["trl, padded, accumulating"] | {"labels_only": True}},
}
TRAINERS = {"sft": SFTTrainer, "reward": RewardTrainer, "dpo": DPOTrainer, "kto": KTOTrainer}
PAIR = ("chosen_ids", "rejected_ids")
# Columns whose tokens are trained on.
COLUMNS = {"sft": ("input_ids",), "reward": PAIR, "dpo": PAIR, "kto": ("answer_ids",)}


def build_ours(
    section: str,
    rows: list[dict[str, Any]],
    folder: str,
    *,
    is_packed: bool | None = None,
    num_tokens: int = workload.VOCABULARY,
    **flags: Any,
) -> tuple[single_model.Trainer, GlobalBatches]:
    """Our trainer of a model in `folder`, and its batches: with --packed, padded in one pass, or (None) as
    the program does it.

    `num_tokens` is the tokenizer's length. The reference of DPO and KTO has already been computed.
    """
    is_sft = section == "sft"
    has_reference = section in ("dpo", "kto")
    load = training_loop.load_ranker if section == "reward" else training_loop.load_policy
    defaults = {"dtype": "fp32", "learning_rate": 1e-5, "lr_scheduler_type": "constant"}
    defaults |= {"per_device_train_batch_size": ROWS_PER_STEP, "packed": bool(is_packed)}
    defaults["max_seq_len"] = MAX_SEQ_LEN
    if has_reference:
        defaults["loss"] = section
    args = (SFTArguments if is_sft else RewardArguments)(
        model_name_or_path=folder, log_interval=10**9, **defaults | flags
    )
    num_rows = args.per_device_train_batch_size
    rows = [dict(row) for row in rows]
    lengths = [[len(row[column]) for row in rows] for column in COLUMNS[section]]
    shared = shared_length if is_packed and COLUMNS[section] == PAIR else None
    collate = collate_sft if is_sft else collate_pairs
    training_rows = single_model.TrainingRows(args, rows, collate, lengths, shared_length=shared)
    config = config_of(args, zero_stage=args.zero_stage, offload="none", micro_batch_size=num_rows)
    start = Start(args, None, None, ds_config=config)  # type: ignore[arg-type]
    model = load(args, start.ds_config, num_tokens, dropout=0.0)
    trainer = single_model.build_trainer(TRAINERS[section], start, model, 10**9)
    if is_packed is not None:
        trainer.is_packed = is_packed
    trainer.logger.open()
    with torch.no_grad():
        for first in range(0, len(rows) if has_reference else 0, ROWS_PER_STEP):
            some = rows[first : first + ROWS_PER_STEP]
            of_rows = trainer.compute_logprobs(collate_pairs(some)).view(-1, 2)
            for row, logprobs in zip(some, of_rows, strict=True):
                row["reference_logprobs"] = logprobs
    return trainer, training_rows.batches(trainer.is_packed)


def our_pass(section: str, rows: list[dict[str, Any]], folder: str, **options: Any) -> Callable[[], None]:
    """A function that trains for one pass; see `build_ours`."""
    trainer, batches = build_ours(section, rows, folder, **options)

    def run() -> None:
        for step in range(1, len(batches) + 1):
            trainer.train_step(step, next(batches))

    return run


def is_large_for_cpu(args: argparse.Namespace) -> bool:
    """Whether all ways at once do not fit into 24 GB: TRL's 16 padded rows alone take 12."""
    return args.model == "smollm2" and not torch.cuda.is_available()


def run_section(section: str, args: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    """The rates of a section, and ours over TRL's best, or over our padded way without TRL.

    To be run in a new process: the memory that three sections keep does not fit beside TRL's processes.
    """
    sizes = workload.sizes_of(args.model, is_quick=args.quick)
    dtype = args.dtype
    build_rows = workload.sft_rows if section == "sft" else workload.pair_rows
    rows = build_rows(num_rows, seed=1)
    num_tokens = sum(len(row[key]) for row in rows for key in COLUMNS[section])
    ways: dict[str, Callable[[], float]] = {}
    shares = PeakShares()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rows_file = Path(folder, "rows.json")
        rows_file.write_text(json.dumps(rows))
        models = workload.save_models(folder, 0, **sizes)
        model = models["reward" if section == "reward" else "policy"]
        for name, is_packed in (("ours, padded", False), ("ours, packed", True)):
            if is_large_for_cpu(args) and not is_packed:
                continue
            vocabulary = sizes.get("vocab_size", workload.VOCABULARY)
            options = {"is_packed": is_packed, "dtype": dtype, "num_tokens": vocabulary}
            run = our_pass(section, rows, model, **options)
            ways[name] = lambda name=name, run=run: num_tokens / shares.timed(name, run)
        for name, way in TRL_WAYS[section].items() if args.trl_python else ():
            if is_large_for_cpu(args) and way.get("batch_size") == ROWS_PER_STEP:
                continue
            peer = Peer(args.trl_python, task=section, rows=str(rows_file), models=folder, dtype=dtype, **way)
            stack.enter_context(peer)
            ways[name] = lambda peer=peer: num_tokens / peer.go()["seconds"]
        rates = take_turns(ways, args.runs)
    title = f"{section}: {num_rows} rows, {num_tokens} tokens a pass, {ROWS_PER_STEP} rows a step"
    ratio = print_rates(title, rates, "trl" if args.trl_python else "ours, padded")
    return {"rates": rates, "ratio": ratio} | shares.facts(dtype)


def labels_only_ratios(sections: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Our best over TRL's with labels only, for the sections that have it."""
    return {
        f"{section}_labels_only": round(best(facts["rates"], "ours") / rate["median"], 4)
        for section, facts in sections.items()
        for name, rate in facts["rates"].items()
        if name.endswith("labels only")
    }


def main() -> None:
    """Run all sections."""
    args = read_args(__doc__, 5, peer_environment="trl-1.16", has_models=True)
    num_rows = 160
    if args.quick or is_large_for_cpu(args):
        num_rows = ROWS_PER_STEP
    sections = {section: in_new_process(run_section, section, args, num_rows) for section in TRL_WAYS}
    rates = sections["sft"]["rates"]
    sizes = workload.sizes_of(args.model, is_quick=args.quick)
    ratios = {section: facts["ratio"] for section, facts in sections.items()} | labels_only_ratios(sections)
    print_result(
        "train",
        best(rates, "ours"),
        best(rates, "trl"),
        ratios=ratios if args.trl_python else None,
        runs=args.runs,
        model=f"random Llama, {workload.size_of(args.dtype, **sizes)}",
        sections=sections,
    )


if __name__ == "__main__":
    main()
