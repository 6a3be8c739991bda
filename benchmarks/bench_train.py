#!/usr/bin/env python
"""Training: tokens a second of SFT, reward modelling and a PPO update, padded and packed, beside TRL.

python benchmarks/bench_train.py --trl_python DIR/bin/python [--quick] [--sections sft reward ppo]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.16 DIR`. Every way trains the same random Llama (4
layers, hidden 256, vocabulary 8192, fp32) on the same rows, as long as a chat data set's (chat_rows.py), 16
rows an optimizer step, with AdamW, clipping and a loss on response tokens only; one turn is one pass over the
rows, and all take turns in one run. Tokens are real ones, padding counts nothing.

  sft     ours padded and packed; TRL's SFTTrainer padded (16 rows at once, and one by one with accumulation),
          padding_free, and packed (best fit decreasing)
  reward  ours padded and packed; TRL's RewardTrainer padded, both ways, and grouped by length (no packing)
  ppo     ours padded and packed: actor and critic updated by 64 responses, 16 a step

The last line is a JSON object; `ratio` is SFT's: our best over TRL's best as it is shipped. `packed, labels
only` is TRL with its output head as it is on a GPU, where it skips what has no label.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.chat_rows import TINY, pair_rows, sft_rows, size_of, small_llama_config, write_rows
from benchmarks.peer_process import PeerProcess, best, leave_out, print_rates, take_turns
from benchmarks.ppo_update import build_ppo_update
from common.data.collators import collate_pairs, collate_sft
from common.data.global_batches import GlobalBatches, TokenBudget
from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_engine
from common.models.policy_model import PolicyModel
from common.models.value_model import ScoreHead, ValueModel
from common.programs import startup
from common.ranks import distributed
from step1_sft.arguments import SFTArguments
from step1_sft.sft_trainer import SFTTrainer
from step2_reward.reward_trainer import RewardTrainer

ROWS_PER_STEP, MAX_SEQ_LEN = 16, 512
SECTIONS = ("sft", "reward", "ppo")
PEER = Path(__file__).with_name("trl_train_peer.py")
# Ways of TRL by section: name and flags. An optimizer step has 16 rows, or 4 packs of 512 tokens;
# smaller micro-batches with accumulation are what a user of TRL can do about padding on a CPU.
TRL_WAYS = {
    "sft": {
        "trl, padded": "--batching padded --batch_size 16",
        "trl, padded, accumulating": "--batching padded --batch_size 1 --accumulation 16",
        "trl, padding_free": "--batching padding_free --batch_size 4 --accumulation 4",
        "trl, packed": "--batching bfd --batch_size 1 --accumulation 4",
        "packed, labels only": "--batching bfd --batch_size 1 --accumulation 4 --labels_only",
    },
    "reward": {
        "trl, padded": "--batching padded --batch_size 16",
        "trl, padded, accumulating": "--batching padded --batch_size 1 --accumulation 16",
        "trl, grouped, accumulating": "--batching grouped --batch_size 2 --accumulation 8",
    },
    "ppo": {},
}


class SilentLogger:
    """Takes a trainer's numbers and keeps the last loss."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Keep the numbers."""
        self.metrics = metrics


def engine_of(model: torch.nn.Module) -> Any:
    """Return the model in an engine of ZeRO 0, as the programs have it."""
    ds_config = build_train_config(EngineOptions(micro_batch_size=ROWS_PER_STEP))
    return build_engine(
        model,
        ds_config,
        SFTArguments(learning_rate=1e-5, lora_learning_rate=1e-5, lr_scheduler_type="constant"),
        1,
    )


def passes(trainer: Any, batches: GlobalBatches) -> Callable[[], None]:
    """Return a function that trains for one pass over the rows."""
    epochs = iter(range(10**6))

    def run() -> None:
        for step, micro_batches in enumerate(batches.epoch(next(epochs)), start=1):
            trainer.train_step(step, micro_batches)

    return run


def build_batches(
    rows: list[Any], collate: Any, lengths: list[tuple[int, ...]], *, is_packed: bool
) -> GlobalBatches:
    """Return the batches as the programs make them with and without --packed."""
    most = ROWS_PER_STEP * len(lengths[0]) * MAX_SEQ_LEN
    return GlobalBatches(
        rows,
        collate,
        rows_per_micro_batch=ROWS_PER_STEP,
        seed=1,
        budget=TokenBudget(lengths, most) if is_packed else None,
    )


def sft_ways(rows: list[dict[str, Any]], config: LlamaConfig) -> dict[str, Callable[[], None]]:
    """Return our ways of SFT."""
    lengths = [(len(row["input_ids"]),) for row in rows]
    ways = {}
    for name, is_packed in (("ours, padded", False), ("ours, packed", True)):
        torch.manual_seed(0)
        engine = engine_of(PolicyModel(LlamaForCausalLM(config), num_valid_tokens=config.vocab_size))
        batches = build_batches(rows, collate_sft, lengths, is_packed=is_packed)
        ways[name] = passes(SFTTrainer(engine, is_packed=False, logger=SilentLogger()), batches)
    return ways


def reward_ways(rows: list[dict[str, Any]], config: LlamaConfig) -> dict[str, Callable[[], None]]:
    """Return our ways of reward modelling."""
    lengths = [(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]
    ways = {}
    for name, is_packed in (("ours, padded", False), ("ours, packed", True)):
        torch.manual_seed(0)
        classifier = LlamaForSequenceClassification(config)
        classifier.score.__class__ = ScoreHead
        trainer = RewardTrainer(
            engine_of(ValueModel(classifier)),
            is_packed=False,
            rank_loss="end_score",
            use_margin=False,
            center_coef=0.0,
            logger=SilentLogger(),
        )
        batches = build_batches(rows, collate_pairs, lengths, is_packed=is_packed)
        ways[name] = passes(trainer, batches)
    return ways


@contextmanager
def peer_ways(section: str, words: list[str], args: argparse.Namespace) -> Iterator[dict[str, PeerProcess]]:
    """Give TRL's ways of a section, started and waiting for their turns; none without an interpreter."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with ExitStack() as stack:
        peers = {}
        for name, flags in TRL_WAYS[section].items() if args.trl_python else ():
            own = [section, *words, *flags.split()]
            peers[name] = stack.enter_context(PeerProcess(args.trl_python, PEER, own, threads))
        yield peers


def rate_of(way: Callable[[], None] | PeerProcess, num_tokens: int) -> Callable[[], float]:
    """Return a function that lets a way train for a pass and returns its tokens a second."""

    def measure() -> float:
        if isinstance(way, PeerProcess):
            answer = way.go()
            return answer["tokens"] / answer["seconds"]
        started = time.perf_counter()
        way()
        return num_tokens / (time.perf_counter() - started)

    return measure


def measure(
    title: str, ways: dict[str, Callable[[], None] | PeerProcess], num_tokens: int, num_runs: int
) -> dict[str, Any]:
    """Return the rates of the ways, and ours over TRL's best, over our padded way where there is no TRL."""
    rates = take_turns({name: rate_of(way, num_tokens) for name, way in ways.items()}, num_runs)
    peer = "trl" if best(rates, "trl") else "ours, padded"
    return {"rates": rates, "ratio": print_rates(title, rates, peer)}


def run_section(section: str, args: argparse.Namespace, num_rows: int, num_runs: int) -> dict[str, Any]:
    """Return the rates and the ratio of a section."""
    config = small_llama_config(num_labels=1, **(TINY if args.quick else {}))
    if section == "ppo":
        ways = {"padded": build_ppo_update(False, config), "packed": build_ppo_update(True, config)}
        num_tokens = next(iter(ways.values())).num_tokens
        named = {f"ours, {name}": way.run for name, way in ways.items()}
        return measure("ppo: an update of actor and critic", named, num_tokens, num_runs)
    rows = sft_rows(num_rows, seed=1) if section == "sft" else pair_rows(num_rows, seed=1)
    keys = ("input_ids",) if section == "sft" else ("chosen_ids", "rejected_ids")
    num_tokens = sum(len(row[key]) for row in rows for key in keys)
    ways = sft_ways(rows, config) if section == "sft" else reward_ways(rows, config)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--rows", write_rows(Path(folder, "rows.json"), rows)]
        if args.quick:  # else the peer makes one of the same size
            LlamaForCausalLM(config).save_pretrained(folder)
            words += ["--model", folder]
        with peer_ways(section, words, args) as peers:
            title = f"{section}: {num_rows} rows, {num_tokens} tokens a pass, {ROWS_PER_STEP} rows a step"
            return measure(title, ways | peers, num_tokens, num_runs)


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl_python", default="", help="interpreter of an environment with TRL 1.16")
    parser.add_argument("--quick", action="store_true", help="tiny model, one round; TRL may be left out")
    parser.add_argument("--runs", type=int, default=0, help="measured rounds (5; 1 with --quick)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    args = parser.parse_args()
    is_alone = bool(set(args.sections) & {"sft", "reward"}) and leave_out(parser, args, "trl-1.16")
    startup.quiet_libraries()
    distributed.start()
    num_runs = args.runs or (1 if args.quick else 5)
    num_rows = ROWS_PER_STEP if args.quick else 160
    found = {section: run_section(section, args, num_rows, num_runs) for section in args.sections}
    rates = found["sft"]["rates"] if "sft" in found else {}
    ratios = {section: None if is_alone else found[section]["ratio"] for section in found}
    result = {
        "name": "train",
        "device": torch.cuda.get_device_name() if distributed.has_gpu() else "cpu",
        "threads": torch.get_num_threads(),
        "ours": best(rates, "ours"),
        "peer": best(rates, "trl"),
        "ratio": ratios.get("sft"),
        "reward_ratio": ratios.get("reward"),
        "runs": num_runs,
        "model": f"random Llama, {size_of(small_llama_config(**(TINY if args.quick else {})))}",
        "sections": found,
    }
    print(json.dumps(result))
    distributed.stop()


if __name__ == "__main__":
    main()
