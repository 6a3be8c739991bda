#!/usr/bin/env python
"""Decoding, a PPO step and its memory on one GPU, with random weights of OPT-1.3B's shape.

python benchmarks/bench_gpu.py [--quick]

  decode  milliseconds of a token step at batch 1, 8, 16 and 32, prompts of 256 tokens and 128 new ones, by
          CUDA graphs and launch by launch; and the lower bound, which is the time to read weights, keys and
          values at the copy bandwidth of this device, measured in the same run. (DeepSpeed's pull request
          8271 has 5.2 ms eagerly and 2.8 ms with graphs, on an H100 at batch 8.)
  ppo     seconds of a whole PPO step of such prompts and responses, by phase, with a critic and a reward
          model of OPT-350M's size: the cases of PPO_CASES that fit by the memory plan, else LoRA. (The same
          pull request has 0.504 s with 8 prompts.)
  memory  the peak of each case, measured and planned by `tools.plan`

With --quick the models are tiny, and a CPU is enough. The last line is a JSON object; its `ratio` is the
lower bound over the time of a token step at batch 1.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.bench_ppo_step import our_step
from benchmarks.measuring import (
    begin,
    copy_bandwidth,
    in_new_process,
    plan_run,
    print_rates,
    print_result,
    print_table,
    take_turns,
    timed,
)
from benchmarks.workload import FIRST_ID, PAD, VOCABULARY, build_tokenizer
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.generation.kv_cache import kv_bytes_per_token
from common.models.attention import choose_attention
from common.models.loading import DTYPES
from common.ranks import distributed
from common.runs.run_logger import peak_memory_gib
from tools.memory_plan import MemoryPlan
from tools.planned_run import known_config

BATCH_SIZES = (1, 8, 16, 32)
PROMPT_TOKENS = 256
NEW_TOKENS = 128
COPIED_BYTES = 2**30
PUBLISHED_SECONDS = 0.504  # an iteration of 8 prompts on an H100: DeepSpeed's pull request 8271
FOUR_PASSES: dict[str, Any] = {
    "num_prompts": 16,
    "per_device_training_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "actor_gradient_checkpointing": True,
    "critic_gradient_checkpointing": True,
}
PPO_CASES: dict[str, dict[str, Any]] = {
    "8 prompts, one pass": {"num_prompts": 8, "per_device_training_batch_size": 8},
    "16 prompts, one pass": {"num_prompts": 16, "per_device_training_batch_size": 16},
    "16 prompts, 4 passes, checkpointing": FOUR_PASSES,
}
LORA = {"16 prompts, 4 passes, LoRA": FOUR_PASSES | {"actor_lora_dim": 64}}
TINY = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "vocab_size": VOCABULARY}
GIB = 2**30


def build_opt(size: str, auto_class: Any = AutoModelForCausalLM, *, is_quick: bool) -> PreTrainedModel:
    """A random OPT of a size, on this process's device in its 16-bit type."""
    config = known_config(f"facebook/opt-{size}")
    for name, value in (TINY if is_quick else {}).items():
        setattr(config, name, value)
    config.num_labels = 1
    torch.manual_seed(0)
    attention = choose_attention(auto_class._model_mapping[type(config)], config, distributed.dtype_name())
    with torch.device(distributed.device()):
        return auto_class.from_config(config, dtype=own_dtype(), attn_implementation=attention).eval()


def own_dtype() -> torch.dtype:
    """Default precision of this device."""
    return DTYPES[distributed.dtype_name()]


class Decode:
    """Token steps of a model with `batch` sequences at a time."""

    def __init__(self, model: PreTrainedModel, batch: int, num_tokens: int, *, use_graphs: bool) -> None:
        self.batch, self.num_tokens = batch, num_tokens
        self.generator = Generator(share_weights(model), num_slots=batch, use_cuda_graphs=use_graphs)
        self.options = SamplingOptions(num_tokens, stop_token_id=-1, pad_token_id=PAD)

    def seconds(self, num_tokens: int) -> float:
        """Seconds to read the prompts and to sample `num_tokens` for each."""
        device = distributed.device()
        ids = torch.randint(FIRST_ID, VOCABULARY, (self.batch, 2 * self.num_tokens), device=device)
        samples = torch.arange(self.batch, device=device)
        batch = PromptBatch(ids, torch.ones_like(ids), samples, torch.full_like(samples, num_tokens))
        return timed(lambda: self.generator.generate(batch, self.options))

    def milliseconds(self) -> float:
        """Milliseconds per token step, excluding the first token, which comes with the prompts."""
        return 1e3 * (self.seconds(self.num_tokens) - self.seconds(1)) / (self.num_tokens - 1)

    def least_milliseconds(self, bandwidth: float) -> float:
        """Milliseconds to read weights, keys and values at a bandwidth."""
        model = self.generator.model
        read = sum(p.numel() * p.element_size() for p in model.parameters())
        length = 2.5 * self.num_tokens  # prompt and half of the response
        read += self.batch * length * kv_bytes_per_token(model.config, own_dtype().itemsize)
        return 1e3 * read / bandwidth


def run_decode(args: Any) -> dict[str, Any]:
    """Milliseconds of token steps with and without graphs, and the lower bound, by batch size."""
    model = build_opt("1.3b", is_quick=args.quick)
    bandwidth = copy_bandwidth(COPIED_BYTES // (64 if args.quick else 1), distributed.device())
    print(f"copies: {bandwidth / 1e9:.0f} GB/s")
    results: dict[str, Any] = {"copy_gb_per_second": round(bandwidth / 1e9, 1), "rates": {}}
    for batch in BATCH_SIZES[:2] if args.quick else BATCH_SIZES:
        by = {name: Decode(model, batch, 32 if args.quick else NEW_TOKENS, use_graphs=name == "ours, graphs")
              for name in ("ours, graphs", "plain")}  # fmt: skip
        least = by["ours, graphs"].least_milliseconds(bandwidth)
        rates = take_turns({name: way.milliseconds for name, way in by.items()}, args.runs)
        print_rates(f"batch {batch}, {least:.2f} ms at least", rates, "plain", "ms", is_lower_better=True)
        results[f"least_ms_batch_{batch}"] = round(least, 4)
        results["rates"] |= {f"batch {batch}, {name}": rate for name, rate in rates.items()}
    return results


def ppo_flags(folder: str, case: dict[str, Any], *, is_quick: bool) -> dict[str, Any]:
    """The flags of step 3 for the models in a folder."""
    num_tokens = NEW_TOKENS
    if is_quick:
        num_tokens //= 8
    return case | {
        "actor_model_name_or_path": f"{folder}/actor",
        "critic_model_name_or_path": f"{folder}/critic",
        "max_prompt_seq_len": 2 * num_tokens,
        "max_answer_seq_len": num_tokens,
        "ppo_epochs": 1,
    }


def plan(flags: dict[str, Any]) -> MemoryPlan:
    """The plan of these flags on this device."""
    machine: dict[str, Any] = {"gpu": "cpu"}
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(distributed.device()).total_memory
        machine = {"gpu": "h100-80g", "gpu_memory_gib": memory / GIB}
    step = flags | {"stage": 3, "enable_hybrid_engine": True}
    step["per_device_generation_batch_size"] = step.pop("num_prompts")
    return MemoryPlan(plan_run(step | machine))


def run_case(flags: dict[str, Any], num_runs: int) -> dict[str, Any]:
    """Seconds of a PPO step, those of its phases, and its measured and planned peaks of memory in GiB.

    The process must be a new one: DeepSpeed's hooks keep the models of an engine on a GPU.
    """
    generator = torch.Generator().manual_seed(1)
    size = (64, flags["max_prompt_seq_len"])
    rows = torch.randint(FIRST_ID, VOCABULARY, size, generator=generator).tolist()
    prompts = [{"row_id": str(i), "input_ids": ids} for i, ids in enumerate(rows)]
    step = our_step(prompts, flags["critic_model_name_or_path"], **flags)
    metrics: dict[str, Any] = {}
    rates = take_turns({"ours": lambda: timed(lambda: metrics.update(step()))}, num_runs)
    peak = plan(flags).peak
    planned = sum(value for (_, what), value in peak.gpu.items() if what != "reserved")
    results = rates["ours"] | {"planned_gib": round(planned / GIB, 2)}
    if torch.cuda.is_available():
        results["peak_gib"] = round(peak_memory_gib(), 2)
    results["mfu"] = round(metrics["perf/mfu"], 4)
    results["logprob_gap"] = round(metrics["policy/logprob_gap"], 5)
    results["phases"] = {
        name.removeprefix("perf/").removesuffix("_seconds"): round(value, 4)
        for name, value in metrics.items()
        if name.startswith("perf/") and name.endswith("_seconds")
    }
    return results


def run_ppo(args: Any) -> dict[str, Any]:
    """The results of each case that fits this device, or of LoRA if none does."""
    with tempfile.TemporaryDirectory() as folder:
        for name, size, kind in (
            ("actor", "1.3b", AutoModelForCausalLM),
            ("critic", "350m", AutoModelForSequenceClassification),
        ):
            build_opt(size, kind, is_quick=args.quick).save_pretrained(Path(folder, name))
            build_tokenizer().save_pretrained(Path(folder, name))
        cases = {name: ppo_flags(folder, case, is_quick=args.quick) for name, case in PPO_CASES.items()}
        fitting = {name: flags for name, flags in cases.items() if plan(flags).fits}
        if not fitting:
            fitting = {name: ppo_flags(folder, case, is_quick=args.quick) for name, case in LORA.items()}
        results = {name: in_new_process(run_case, flags, args.runs) for name, flags in fitting.items()}
    print(f"\na PPO step, seconds ({PUBLISHED_SECONDS} published, 8 prompts on an H100)")
    columns = ("median", "low", "high", "peak_gib", "planned_gib", "mfu")
    print_table([{"case": name} | {c: of.get(c, "") for c in columns} for name, of in results.items()])
    print("its phases, seconds")
    print_table([{"case": name} | of["phases"] for name, of in results.items()])
    return results


def main() -> None:
    """Run all sections."""
    args = begin(__doc__, 5)
    results = {"decode": run_decode(args), "ppo": run_ppo(args)}
    results["published_ppo_seconds"] = PUBLISHED_SECONDS
    decode = results["decode"]
    print_result(
        "gpu",
        decode["rates"]["batch 1, ours, graphs"]["median"],
        decode["least_ms_batch_1"],
        is_lower_better=True,
        runs=args.runs,
        unit="ms",
        model=f"random OPT{', tiny' if args.quick else '-1.3B'}, {own_dtype()}",
        sections=results,
    )


if __name__ == "__main__":
    main()
