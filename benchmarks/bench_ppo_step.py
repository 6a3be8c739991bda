#!/usr/bin/env python
"""A whole PPO step, ours and TRL's: prompts, generation, the scores of four models, advantages, all updates.

python benchmarks/bench_ppo_step.py --trl_python DIR/bin/python [--algorithm grpo] [--model smollm2] [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.12 DIR`: the last release with a PPOTrainer. Both sides
load the same models (4 layers, hidden 256, vocabulary 8192, fp32; with --model smollm2, the default on a GPU,
SmolLM2-135M's shape; workload.py), take 16 prompts per step with the lengths of a chat data set, 256 tokens
at most, sample responses of up to 64 tokens with the lengths of real ones, take 4 optimizer steps each for
actor and critic, and run one thread each, in turns. TRL does not clip gradients, and pads every response to
64.

  ours                 --enable_hybrid_engine --packed, as in the launch scripts
  ours, cut by rows    without --packed

--algorithm grpo: a whole GRPO step, compared with TRL 1.16 (DIR of `make_peer_env.sh trl-1.16`): 8 responses
to each of 16 prompts per step, the same lengths, a reference, a reward model, one optimizer step of all 128
responses, gradients clipped on both sides. TRL trains on 16 responses at a time, pads all of a step to its
longest prompt and response, and scores responses as text, without their EOS.

  ours, prompts apart   with --no_share_prompts
  labels only           TRL with its output head as on a GPU, where it skips prompts and padding

--lora R: actor and critic are adapters of rank R of their bases, without TRL; `generation_seconds` are those
of a step's generation.

  ours           --merge_adapters false: adapters beside the weights
  ours, merged   --merge_adapters true: into a copy of them

The last line is a JSON object; `ratio` is TRL's seconds per step over ours, or those of merged adapters;
`ratios` has it by name, also with labels only.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.measuring import PeakShares, Peer, begin, print_rates, print_result, take_turns
from benchmarks.workload import ppo_prompts, save_models, size_of, sizes_of
from common.data.collators import collate_prompts
from common.data.global_batches import GlobalBatches, RowPlan
from common.data.stage_datasets import StageData
from common.data.token_cache import DataReport
from common.runs.run import Run
from step3_ppo.algorithms import fill_defaults, find_algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_trainer import build_trainer
from step3_ppo.checks import PPOStart
from step3_ppo.policy_losses import build_policy_loss
from step3_ppo.rewards.reward_specs import RewardSpec

NUM_PROMPTS = 16
NUM_SAMPLES = 8
MAX_PROMPT = 256
MAX_RESPONSE = 64
PPO_EPOCHS = 4


def our_step(
    prompts: list[dict[str, Any]],
    reward_model: str,
    *,
    algorithm: str = "ppo",
    num_prompts: int = NUM_PROMPTS,
    **flags: Any,
) -> Callable[[], dict]:
    """A function that runs one step of `num_prompts` prompts and returns its metrics."""
    algorithm_entry = find_algorithm(algorithm)
    rates = {"actor_learning_rate": 1e-6, "critic_learning_rate": 1e-6}  # response lengths must not change
    args = PPOArguments(
        algorithm=algorithm,
        per_device_generation_batch_size=num_prompts,
        num_warmup_steps=0,
        lr_scheduler_type="constant",
        enable_hybrid_engine=True,
        log_interval=10**9,
        **rates | flags,
    )
    args = fill_defaults(args, algorithm_entry)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.actor_model_name_or_path)
    rewards = [RewardSpec("model", reward_model, 1.0, "model")]
    start = PPOStart(args, None, None, tokenizer=tokenizer, algorithm=algorithm_entry, rewards=rewards)  # type: ignore[arg-type]
    start.policy_loss = build_policy_loss(args)
    no_texts = {"prompt_text": "", "messages": "[]", "fields": "{}"}
    rows = [{"prompt_ids": row["input_ids"], "row_id": row["row_id"]} | no_texts for row in prompts]
    batches = GlobalBatches.by_rows(rows, collate_prompts, RowPlan(num_prompts), seed=1)
    trainer = build_trainer(start, 10**6, batches)
    trainer.logger.open()
    data = StageData(prompts, prompts, DataReport())
    run = Run(args, start.earlier, trainer.logger, data, {}, {}, steps_per_epoch=1)
    steps = iter(range(1, 10**6))
    return lambda: trainer.train_step(next(steps), run)


def peer_turn(peer: Peer, tokens: list[float]) -> float:
    """Let the peer take a step and return its seconds; append its response tokens to `tokens`."""
    answer = peer.go()
    tokens.append(answer["tokens"])
    return answer["seconds"]


def main() -> None:
    """Compare."""
    peer_environments = {"ppo": "trl-1.12", "grpo": "trl-1.16"}
    args = begin(__doc__, 10, algorithms=peer_environments, has_models=True)
    is_grpo = args.algorithm == "grpo"
    num_samples = NUM_SAMPLES if is_grpo else 1
    own: dict[str, Any] = {"packed": True}
    other = "ours, cut by rows"
    difference: dict[str, Any] = {"packed": False}
    if args.lora:
        own |= {"actor_lora_dim": args.lora, "critic_lora_dim": args.lora, "merge_adapters": "false"}
        other = "ours, merged"
        difference = {"merge_adapters": "true"}
    elif is_grpo:
        other = "ours, prompts apart"
        difference = {"no_share_prompts": True}
    torch.set_num_threads(1)
    sizes = sizes_of(args.model, is_quick=args.quick)
    dtype = args.dtype
    shares = PeakShares()
    tokens: dict[str, list[float]] = {name: [] for name in ("ours", other, "trl", "labels only")}  # per step
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", other)}  # of generation
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        models = save_models(folder, seed=0, **sizes)
        prompts = ppo_prompts(256, 1, MAX_PROMPT)
        flags = {
            "actor_model_name_or_path": models["policy"],
            "critic_model_name_or_path": models["value"],
            "max_prompt_seq_len": MAX_PROMPT,
            "max_answer_seq_len": MAX_RESPONSE,
            "per_device_training_batch_size": NUM_PROMPTS,
            "gradient_accumulation_steps": num_samples,
            "num_samples_per_prompt": num_samples,
            "algorithm": args.algorithm,
            "ppo_epochs": 1 if is_grpo else PPO_EPOCHS,
            "kl_coef": 0.05,
            "dtype": dtype,
        }
        num_rows = NUM_PROMPTS * num_samples

        def our_turn(name: str, step: Callable[[], dict]) -> float:
            """Seconds of a step."""
            metrics: dict[str, float] = {}
            taken = shares.timed(name, lambda: metrics.update(step()))
            tokens[name].append(num_rows * metrics["rollout/response_tokens"])
            seconds[name].append(metrics["perf/generate_seconds"])
            return taken

        ways = {
            name: partial(our_turn, name, our_step(prompts, models["reward"], **flags, **more))
            for name, more in (("ours", own), (other, own | difference))
        }
        if args.trl_python:
            rows_file = Path(folder, "prompts.json")
            rows_file.write_text(json.dumps(prompts))
            task = {"task": args.algorithm, "rows": str(rows_file), "models": folder, "dtype": dtype}
            for name in ("trl", "labels only")[: 1 + is_grpo]:
                only = name == "labels only"
                peer = Peer(args.trl_python, **task, accumulation=num_samples, labels_only=only)
                stack.enter_context(peer)
                ways[name] = lambda name=name, peer=peer: peer_turn(peer, tokens[name])
        rates = take_turns(ways, args.runs)
    title = f"a whole {args.algorithm.upper()} step"
    peer = "trl" if args.trl_python else other
    print_rates(title, rates, peer, "seconds", is_lower_better=True)
    for name in rates:
        print(f"{name}: {statistics.fmean(tokens[name]):.1f} response tokens a step")
    facts = shares.facts(dtype)
    if args.lora:
        facts["generation_seconds"] = {n: round(statistics.median(s[1:] or s), 4) for n, s in seconds.items()}
        print("generation alone: ", facts["generation_seconds"])
    names = {"trl": args.algorithm, "labels only": "grpo_labels_only", "ours, merged": "merged"}
    ratios = {
        names[name]: round(rate["median"] / rates["ours"]["median"], 4)
        for name, rate in rates.items()
        if name in names
    }
    print_result(
        f"{args.algorithm}_step",
        rates["ours"]["median"],
        rates[peer]["median"] if args.trl_python or args.lora else None,
        is_lower_better=True,
        ratios=ratios or None,
        runs=args.runs,
        model=f"random Llamas, {size_of(dtype, **sizes)}; 16 prompts x {num_samples}, up to 64 tokens",
        max_prompt=MAX_PROMPT,
        rates=rates,
        **facts,
    )


if __name__ == "__main__":
    main()
