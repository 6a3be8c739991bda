#!/usr/bin/env python
"""Memory of PPO with LoRA where actor, critic and reward model are adapters of one base, and of copies.

python benchmarks/bench_shared_base.py [--quick]

  shared  three saved adapters of one base: its parameters are held once
  merged  the same, with --merge_adapters true: generation has a copy of the actor's adapted weights
  copies  the same adapters as in `shared`, each with a separate base

Each case runs in a separate process that builds the four roles of a random Llama (fp32; workload.py) and
takes two steps of 4 prompts with responses of up to 32 tokens. `held` is the increase of resident memory from
before the models are loaded to the end of the first step, `peak` that to the peak of the second, `sampling`
what the first generation adds; `planned` is the plan of `tools.plan` for the same flags, tensors only, and
`copies to sample` its part that generation alone holds: slices of weights.

The last line is a JSON object, in MiB; `ratio` is the copies' peak over that of the shared base.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from transformers import LlamaForCausalLM

from benchmarks.bench_ppo_step import our_step
from benchmarks.measuring import (
    in_new_process,
    peak_since,
    plan_run,
    print_result,
    print_table,
    read_args,
    reset_peak,
)
from benchmarks.workload import TINY, VOCABULARY, build_tokenizer, ppo_prompts, size_of, small_llama_config
from common.generation.hybrid_engine import HybridEngine
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from common.models.value_model import load_value_model
from common.runs.export import save_adapter
from tools.memory_plan import MemoryPlan

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 8}
RANK = 8
NUM_PROMPTS = 4
MAX_PROMPT = 64
MAX_RESPONSE = 32
ROLES = ("actor", "critic", "reward")
MIB = 2**20


def save_adapters(folder: Path, sizes: dict[str, int], *, is_shared: bool) -> dict[str, str]:
    """Folder of each role's adapter; all of one base, or each of a separate base."""
    tokenizer = build_tokenizer()
    lora = LoraOptions(RANK)
    for role in ROLES:
        base = folder / ("base" if is_shared else f"{role}_base")
        if not base.exists():
            torch.manual_seed(0)
            LlamaForCausalLM(small_llama_config(**sizes)).save_pretrained(base)
        options = ModelOptions(str(base), dropout=0.0)
        if role == "actor":
            model = add_lora(load_causal_lm(options, VOCABULARY), lora)
        else:
            model = load_value_model(options, VOCABULARY, lora, seed=0).classifier
        save_adapter(folder / role, model, tokenizer, {})
    return {role: str(folder / role) for role in ROLES}


def ppo_flags(folders: dict[str, str], *, merges: bool) -> dict[str, Any]:
    """The flags of step 3 for these adapters."""
    return {
        "merge_adapters": str(merges).lower(),
        "actor_model_name_or_path": folders["actor"],
        "critic_model_name_or_path": folders["critic"],
        "actor_lora_dim": RANK,
        "critic_lora_dim": RANK,
        "max_prompt_seq_len": MAX_PROMPT,
        "max_answer_seq_len": MAX_RESPONSE,
        "per_device_training_batch_size": NUM_PROMPTS,
        "dtype": "fp32",
    }


def measure(folders: dict[str, str], *, merges: bool) -> dict[str, float]:
    """The bytes held and at the peak in this process, which must be a new one."""
    prompts = ppo_prompts(64, 1, MAX_PROMPT)
    before = reset_peak()
    growth: list[float] = []
    switch = HybridEngine.generation_mode

    @contextmanager
    def measured(hybrid: HybridEngine) -> Iterator[Any]:
        resident = reset_peak()
        with switch(hybrid) as module:
            yield module
            growth.append(peak_since(resident))

    with mock.patch.object(HybridEngine, "generation_mode", measured):
        step = our_step(
            prompts, folders["reward"], num_prompts=NUM_PROMPTS, **ppo_flags(folders, merges=merges)
        )
        step()
    held = reset_peak() - before
    step()
    return {"held": held, "sampling": growth[0], "peak": peak_since(before)}


def plan_bytes(folders: dict[str, str], *, merges: bool) -> dict[str, float]:
    """Planned bytes of the weights of all roles, and of all tensors, at the peak."""
    flags = {"stage": 3, "gpu": "cpu", "enable_hybrid_engine": True, "reward": f"model:{folders['reward']}"}
    flags |= ppo_flags(folders, merges=merges) | {"per_device_generation_batch_size": NUM_PROMPTS}
    plan = MemoryPlan(plan_run(flags))
    held = plan.peak.gpu
    return {
        "copies to sample": plan.of_phase("generate").gpu["actor", "slices of weights"],
        "weights": sum(size for (_, what), size in held.items() if what == "weights"),
        "planned": sum(size for (_, what), size in held.items() if what != "reserved"),
    }


def main() -> None:
    """Measure all."""
    args = read_args(__doc__)
    sizes = TINY if args.quick else SIZES
    cases: dict[str, dict[str, float]] = {}
    for name in ("shared", "merged", "copies"):
        merges = name == "merged"
        with tempfile.TemporaryDirectory() as folder:
            folders = save_adapters(Path(folder), sizes, is_shared=name != "copies")
            measured = in_new_process(measure, folders, merges=merges) | plan_bytes(folders, merges=merges)
        cases[name] = {what: round(size / MIB, 2) for what, size in measured.items()}
    print_table([{"MiB": name} | case for name, case in cases.items()])
    print_result(
        "shared_base",
        cases["shared"]["peak"],
        cases["copies"]["peak"],
        is_lower_better=True,
        runs=1,
        unit="MiB",
        model=f"random Llama, {size_of(**sizes)}; LoRA of rank {RANK}",
        cases=cases,
    )


if __name__ == "__main__":
    main()
