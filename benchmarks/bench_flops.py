#!/usr/bin/env python
"""Floating-point operations (FLOPs) of the matrix products in each step, and the minimum that it needs.

python benchmarks/bench_flops.py [--quick]

The models of bench_train.py and bench_ppo_step.py (4 layers, hidden 256, vocabulary 8192), the same rows,
with the flags of the launch scripts (--packed, hybrid engine), on a CPU: a pass of sft, reward and dpo over
32 rows; the second step of ppo with 4 prompts, and of grpo with 4 prompts of 8 responses each. "Done" is the
count of torch's FLOP counter. "Needed" is the following, times three for a backward pass if weights are
trained:
  - each token that is used, once if several sequences of a pair or group start with it
  - attention of a token to itself and to earlier tokens of its sequence
  - the last layer at the positions that are used, except for the keys and values before them
  - the output head at the positions before scored tokens
Logits and attention scores that are recomputed in the backward pass are done but not needed. The last line is
a JSON object with done over needed for each whole step; its `ratio` is all that is needed over all done.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from benchmarks import bench_ppo_step, bench_train
from benchmarks.measuring import begin, print_result, print_table
from benchmarks.workload import (
    TINY,
    VOCABULARY,
    pair_rows,
    ppo_prompts,
    save_models,
    sft_rows,
    size_of,
    small_llama_config,
)
from common.data.packed_batch import PackedBatch
from common.programs import single_model
from common.ranks.step_costs import COSTS
from step2_reward.answer_scores import SIDES
from step3_ppo.ppo_trainer import PPOTrainer

NUM_ROWS = 32
NUM_PROMPTS = 4
NUM_SAMPLES = 8
QUICK_ROWS, QUICK_PROMPTS = 16, 2
MAX_PROMPT = bench_ppo_step.MAX_PROMPT
MAX_RESPONSE = bench_ppo_step.MAX_RESPONSE
KEYS_AT_ONCE = 512  # block of keys that torch's CPU attention multiplies, masked ones included

Read = tuple[list[int], set[int]]  # a sequence's token ids, and the positions that are used
Groups = list[list[Read]]  # sequences that may share a prefix


# ---- FLOPs done -----------------------------------------------------------------------------------------


def _cpu_attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    num_keys = key[2]
    if num_keys > KEYS_AT_ONCE:
        raise NotImplementedError(f"{num_keys} keys: skipped blocks would have to be counted")
    return 2 * query[0] * query[1] * query[2] * num_keys * (query[3] + value[3])


def _cpu_attention_backward(of_output: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _cpu_attention(query, key, value) * 5 // 2  # recomputed scores, and four products for gradients


def _added_product(_: Any, left: torch.Size, right: torch.Size, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _onednn_product(hidden: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * hidden.numel() * weight[0]


def build_counter() -> FlopCounterMode:
    """torch's counter, extended by CPU attention, in-place addmm and oneDNN's products of generation."""
    aten = torch.ops.aten
    more = {
        aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
        aten.addmm_: _added_product,
        torch.ops.mkldnn._linear_pointwise: _onednn_product,
    }
    return FlopCounterMode(display=False, custom_mapping=more)


@contextmanager
def counted_phases() -> Iterator[Counter]:
    """Context that yields the FLOPs of each phase's clock; those outside a phase have the key None."""
    done = Counter()
    clock = COSTS.clock

    @contextmanager
    def counting_clock(name: str) -> Iterator[None]:
        is_outer = not COSTS._running
        before = counter.get_total_flops()
        with clock(name):
            yield
        if is_outer:
            done[name] += counter.get_total_flops() - before

    with build_counter() as counter, mock.patch.object(COSTS, "clock", counting_clock):
        yield done
    done[""] = counter.get_total_flops() - done.total()


# ---- FLOPs needed ---------------------------------------------------------------------------------------


@dataclass
class Work:
    """The work of a forward pass."""

    tokens: int = 0
    pairs: int = 0  # query-key pairs: a token with itself or an earlier one
    read_tokens: int = 0  # tokens whose last hidden state is used
    read_pairs: int = 0

    @classmethod
    def of(cls, groups: Groups) -> "Work":
        """The minimal work."""
        work = cls()
        for group in groups:
            nodes: dict[tuple[int, int], int] = {}  # (node of the prefix, token): node
            seen: set[int] = set()
            for ids, reads in group:
                node = 0
                for position, token in enumerate(ids[: max(reads) + 1]):
                    if (node, token) not in nodes:
                        nodes[node, token] = len(nodes) + 1
                        work.tokens += 1
                        work.pairs += position + 1
                    node = nodes[node, token]
                    if position in reads and node not in seen:
                        seen.add(node)
                        work.read_tokens += 1
                        work.read_pairs += position + 1
        return work


def forward_flops(config: LlamaConfig, work: Work, head_rows: int) -> int:
    """FLOPs of a forward pass; the head has `head_rows` rows."""
    width = config.num_attention_heads * config.head_dim
    keys_values = 2 * config.hidden_size * config.num_key_value_heads * config.head_dim
    others = 2 * config.hidden_size * width + 3 * config.hidden_size * config.intermediate_size
    lower = config.num_hidden_layers - 1
    matrices = work.tokens * (lower * (others + keys_values) + keys_values) + work.read_tokens * others
    attention = 2 * width * (lower * work.pairs + work.read_pairs)
    return 2 * (matrices + attention + work.read_tokens * head_rows * config.hidden_size)


def phase_row(
    config: LlamaConfig, done: int, passes: Iterable[Groups], *, is_policy: bool, is_trained: bool
) -> dict[str, int]:
    """FLOPs of a phase, done and needed; `passes`: the sequences of each of its passes."""
    head_rows = VOCABULARY if is_policy else 1
    factor = 3 if is_trained else 1
    needed = sum(factor * forward_flops(config, Work.of(groups), head_rows) for groups in passes)
    if done < needed:
        raise RuntimeError(f"{done} FLOPs were counted, but {needed} are needed: some products were missed")
    return {"done": done, "needed": needed}


# ---- the steps ------------------------------------------------------------------------------------------


def row_groups(section: str, batch: PackedBatch) -> Groups:
    """Sequences of a training batch, and the positions that their losses use."""
    if section == "sft":
        columns = zip(batch.sequences("input_ids"), batch.sequences("loss_mask"), strict=True)
        return [[(ids.tolist(), set((mask.nonzero() - 1).flatten().tolist()))] for ids, mask in columns]
    sides = []
    for side in SIDES:
        starts = batch.numbers(f"{side}_response_start").tolist()
        ids = [sequence.tolist() for sequence in batch.sequences(f"{side}_ids")]
        sides.append([(s, end_or_answer(s, start, section)) for s, start in zip(ids, starts, strict=True)])
    return [list(pair) for pair in zip(*sides, strict=True)]


def end_or_answer(ids: list[int], start: int, section: str) -> set[int]:
    """The last position for a reward model, else those before an answer's tokens."""
    return {len(ids) - 1} if section == "reward" else set(range(start - 1, len(ids) - 1))


def count_training(section: str, folder: str, config: LlamaConfig, num_rows: int) -> dict[str, dict]:
    """The table row of a pass with a single phase."""
    rows = (sft_rows if section == "sft" else pair_rows)(num_rows, seed=1)
    run = bench_train.our_pass(section, rows, folder, is_packed=True)
    passes = []
    train_step = single_model.Trainer.train_step

    def record(trainer: Any, step: int, micro_batches: list[PackedBatch]) -> None:
        passes.append([group for batch in micro_batches for group in row_groups(section, batch)])
        train_step(trainer, step, micro_batches)

    with mock.patch.object(single_model.Trainer, "train_step", record), counted_phases() as done:
        run()
    is_policy = section != "reward"
    return {"training": phase_row(config, done.total(), passes, is_policy=is_policy, is_trained=True)}


def response_groups(batches: Iterable[PackedBatch], section: str) -> Groups:
    """The responses grouped by prompt, and the positions that are used."""
    groups: dict[int, list[Read]] = {}
    for batch in batches:
        columns = (batch.sequences("prompt_ids"), batch.sequences("response_ids"))
        for number, prompt, response in zip(batch.numbers("group_ids").tolist(), *columns, strict=True):
            ids = prompt.tolist() + response.tolist()
            groups.setdefault(number, []).append((ids, end_or_answer(ids, len(prompt), section)))
    return list(groups.values())


def count_rollouts(
    algorithm: str, models: dict[str, str], config: LlamaConfig, num_prompts: int
) -> dict[str, dict]:
    """The table rows of the second step of PPO or GRPO by phase: the first step checks the sampler."""
    num_samples = NUM_SAMPLES if algorithm == "grpo" else 1
    flags = {
        "actor_model_name_or_path": models["policy"],
        "critic_model_name_or_path": models["value"],
        "max_prompt_seq_len": MAX_PROMPT,
        "max_answer_seq_len": MAX_RESPONSE,
        "per_device_training_batch_size": num_prompts * num_samples,
        "num_samples_per_prompt": num_samples,
        "algorithm": algorithm,
        "num_prompts": num_prompts,
        "dtype": "fp32",
        "packed": True,
    }
    updates: list[list[PackedBatch]] = []
    rollouts: list[PackedBatch] = []
    update = PPOTrainer.update

    def record(
        trainer: Any, current: Any, make_step: Any, micro_batches: list[PackedBatch], *more: Any
    ) -> None:
        rollouts[:] = [current.batch]
        updates.append(micro_batches)
        update(trainer, current, make_step, micro_batches, *more)

    with mock.patch.object(PPOTrainer, "update", record):
        step = bench_ppo_step.our_step(ppo_prompts(64, 1, MAX_PROMPT), models["reward"], **flags)
        step()
        updates.clear()
        with counted_phases() as done:
            step()
    of_values = ("critic", "reward", "critic_update")
    return {
        phase: phase_row(
            config,
            flops,
            [
                response_groups(batches, "reward" if phase == "reward" else "policy")
                for batches in (updates if phase.endswith("update") else [rollouts])
            ],
            is_policy=phase not in of_values,
            is_trained=phase.endswith("update"),
        )
        for phase, flops in done.items()
        if flops
    }


def main() -> None:
    """Count all steps."""
    args = begin(__doc__)
    sizes = TINY if args.quick else {}
    config = small_llama_config(**sizes)
    num_rows, num_prompts = (QUICK_ROWS, QUICK_PROMPTS) if args.quick else (NUM_ROWS, NUM_PROMPTS)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(folder, 0, **sizes)
        for section in ("sft", "reward", "dpo"):
            model = models["reward" if section == "reward" else "policy"]
            results[section] = count_training(section, model, config, num_rows)
        for algorithm in ("ppo", "grpo"):
            results[algorithm] = count_rollouts(algorithm, models, config, num_prompts)
    for phases in results.values():
        phases["whole"] = dict(sum((Counter(row) for row in phases.values()), Counter()))
    print_table(
        [
            {"phase": f"{section} {phase}"} | row | {"ratio": row["done"] / row["needed"]}
            for section, phases in results.items()
            for phase, row in phases.items()
        ]
    )
    done, needed = (sum(f["whole"][name] for f in results.values()) for name in ("done", "needed"))
    print_result(
        "flops",
        done,
        needed,
        is_lower_better=True,
        runs=1,
        unit="FLOP",
        model=f"random Llamas, {size_of(**sizes)}",
        **{section: round(f["whole"]["done"] / f["whole"]["needed"], 4) for section, f in results.items()},
        phases=results,
    )


if __name__ == "__main__":
    main()
