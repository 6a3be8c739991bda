#!/usr/bin/env python
"""A whole PPO step, ours and TRL's: prompts, generation, the scores of four models, advantages, all updates.

python benchmarks/bench_ppo_step.py --trl_python DIR/bin/python [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.12 DIR`: the last release with a PPOTrainer. Both sides
load the same models (4 layers, hidden 256, vocabulary 8192, fp32; ppo_models.py), take 16 prompts a step, as
long as a chat data set's, 256 tokens at most (--max_prompt 64 cuts them short), and
answer with up to 64 tokens whose lengths are those of real answers, make 4 optimizer steps of each of actor
and critic, and run one thread each, in turns. TRL does not clip gradients, and pads every answer to 64.

  ours           --enable_hybrid_engine --packed, as the launch scripts have it
  ours, padded   the same without --packed

The last line is a JSON object; `ratio` is TRL's seconds a step over ours.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.chat_rows import TINY, ppo_prompts, size_of, small_llama_config, write_rows
from benchmarks.peer_process import PeerProcess, leave_out, take_turns
from benchmarks.ppo_models import save_models
from common.data.collators import collate_prompts
from common.data.global_batches import GlobalBatches
from common.programs import startup
from common.ranks import distributed
from common.runs.resume import EarlierRun
from step3_ppo.algorithms import fill_defaults, find_algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.main import build_trainer
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.start_up import StartUp

NUM_PROMPTS, MAX_PROMPT, MAX_RESPONSE, PPO_EPOCHS = 16, 256, 64, 4


def our_step(models: dict[str, str], prompts: list[dict[str, Any]], *, is_packed: bool) -> Callable[[], dict]:
    """Return a function that does one PPO step and returns its metrics."""
    algorithm = find_algorithm("ppo")
    args = PPOArguments(
        actor_model_name_or_path=models["policy"],
        critic_model_name_or_path=models["value"],
        max_prompt_seq_len=MAX_PROMPT,
        max_answer_seq_len=MAX_RESPONSE,
        per_device_generation_batch_size=NUM_PROMPTS,
        per_device_training_batch_size=NUM_PROMPTS,
        ppo_epochs=PPO_EPOCHS,
        num_warmup_steps=0,
        lr_scheduler_type="constant",
        actor_learning_rate=1e-6,  # the lengths must stay what they are
        critic_learning_rate=1e-6,
        enable_hybrid_engine=True,
        packed=is_packed,
        dtype="fp32",
        log_interval=10**9,
    )
    args = fill_defaults(args, algorithm)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models["policy"])
    rewards = [RewardSpec("model", models["reward"], 1.0, "model")]
    start = StartUp(tokenizer, None, algorithm, rewards, [], EarlierRun())  # type: ignore[arg-type]
    rows = [
        {"prompt_ids": row["input_ids"], "row_id": row["row_id"], "prompt_text": "", "fields": "{}"}
        for row in prompts
    ]
    batches = GlobalBatches(rows, collate_prompts, rows_per_micro_batch=NUM_PROMPTS, seed=1)
    trainer = build_trainer(dataclasses.replace(args), start, 10**6, batches, [], pretraining=None)
    trainer.logger.open()
    trainer.logger.begin_anew()
    steps = iter(range(1, 10**6))
    return lambda: trainer.train_step(next(steps))


def print_table(rates: dict[str, dict[str, float]], tokens: dict[str, list[float]]) -> float | None:
    """Print the table; return TRL's seconds over ours, None without TRL."""
    base = rates["trl"]["median"] if "trl" in rates else math.nan
    print(f"\n{'way':<16}{'s a step':>9}  {'range':<14}{'answers, tokens':>16}{'x TRL':>8}")
    for name, rate in rates.items():
        spread = f"{rate['low']:.2f} - {rate['high']:.2f}"
        num_tokens, ratio = statistics.fmean(tokens[name]), base / rate["median"]
        print(f"{name:<16}{rate['median']:>9.2f}  {spread:<14}{num_tokens:>16.0f}{ratio:>8.2f}")
    return round(base / rates["ours"]["median"], 4) if "trl" in rates else None


def timed(run: Callable[[], dict] | PeerProcess, tokens: list[float]) -> Callable[[], float]:
    """Return a way that takes a step and returns its seconds; its response tokens join `tokens`."""

    def measure() -> float:
        if isinstance(run, PeerProcess):
            answer = run.go()
            tokens.append(answer["generated_tokens"])
            return answer["seconds"]
        started = time.perf_counter()
        metrics = run()
        tokens.append(NUM_PROMPTS * metrics["rollout/response_tokens"])
        return time.perf_counter() - started

    return measure


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl_python", default="", help="interpreter of an environment with TRL 1.12")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round; TRL may be left out")
    parser.add_argument("--runs", type=int, default=0, help="measured rounds (10; 1 with --quick)")
    parser.add_argument("--max_prompt", type=int, default=MAX_PROMPT, help="longer prompts are cut")
    args = parser.parse_args()
    is_alone = leave_out(parser, args, "trl-1.12")
    torch.set_num_threads(1)
    startup.quiet_libraries()
    distributed.start()
    num_runs = args.runs or (1 if args.quick else 10)
    changes = TINY if args.quick else {}
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(folder, seed=0, **changes)
        prompts = ppo_prompts(256, 1, args.max_prompt)
        rows_file = write_rows(Path(folder, "prompts.json"), prompts)
        words = ["--rows", rows_file, "--models", folder, "--num_ppo_epochs", str(PPO_EPOCHS)]
        script = Path(__file__).with_name("trl_ppo_peer.py")
        ways = {
            "ours": our_step(models, prompts, is_packed=True),
            "ours, padded": our_step(models, prompts, is_packed=False),
        }
        threads = {"OMP_NUM_THREADS": "1"}
        peer = PeerProcess(args.trl_python, script, words, threads, environment="trl-1.12")
        with nullcontext() if is_alone else peer as started:
            tokens = {name: [] for name in (*ways, "trl")}
            measured = {name: timed(run, tokens[name]) for name, run in ways.items()}
            if started:
                measured["trl"] = timed(started, tokens["trl"])
            rates = take_turns(measured, num_runs)
    result = {
        "name": "ppo_step",
        "device": "cpu",
        "threads": 1,
        "ratio": print_table(rates, tokens),
        "ours": rates["ours"]["median"],
        "peer": None if is_alone else rates["trl"]["median"],
        "runs": num_runs,
        "model": f"random Llamas, {size_of(small_llama_config(**changes))}; 16 prompts, up to 64 tokens",
        "max_prompt": args.max_prompt,
        "rates": rates,
    }
    print(json.dumps(result))
    distributed.stop()


if __name__ == "__main__":
    main()
