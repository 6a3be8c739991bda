#!/usr/bin/env python
"""Decoding, a PPO step and its memory on one GPU, with random weights of OPT-1.3B's shape.

python benchmarks/bench_gpu.py [--quick]

  decode  milliseconds of a token step at batch 1, 8, 16 and 32, prompts of 256 tokens and 128 new ones, by
          CUDA graphs and launch by launch; and the lower bound, which is the time to read weights, keys and
          values at the copy bandwidth of this device, measured in the same run. (DeepSpeed's pull request
          8271 has 5.2 ms eagerly and 2.8 ms with graphs, on an H100 at batch 8.)
  ppo     seconds of a whole PPO step: 16 such prompts and responses, a critic and a reward model of
          OPT-350M's size; with LoRA if full training does not fit by the memory plan
  memory  the peak of that step, measured and planned by `tools.plan`

With --quick the models are tiny, and a CPU is enough. The last line is a JSON object; its `ratio` is the
lower bound over the time of a token step at batch 1.
"""

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.bench_ppo_step import NUM_PROMPTS, our_step
from benchmarks.measuring import (
    begin,
    copy_bandwidth,
    plan_run,
    print_rates,
    print_result,
    take_turns,
    timed,
)
from benchmarks.workload import FIRST_ID, PAD, VOCABULARY, build_tokenizer
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.generation.kv_cache import kv_bytes_per_token
from common.models.loading import DTYPES
from common.ranks import distributed
from tools.memory_plan import MemoryPlan
from tools.planned_run import known_config

BATCH_SIZES = (1, 8, 16, 32)
PROMPT_TOKENS = 256
NEW_TOKENS = 128
COPIED_BYTES = 2**30
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
    with torch.device(distributed.device()):
        return auto_class.from_config(config, dtype=own_dtype()).eval()


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


def ppo_flags(folder: str, *, is_quick: bool, with_lora: bool) -> dict[str, Any]:
    """The flags of step 3 for the models in a folder."""
    num_tokens = NEW_TOKENS
    if is_quick:
        num_tokens //= 8
    return {
        "actor_model_name_or_path": f"{folder}/actor",
        "critic_model_name_or_path": f"{folder}/critic",
        "max_prompt_seq_len": 2 * num_tokens,
        "max_answer_seq_len": num_tokens,
        "per_device_training_batch_size": NUM_PROMPTS // 4,
        "gradient_accumulation_steps": 4,
        "ppo_epochs": 1,
        "actor_lora_dim": 64 if with_lora else 0,
        "actor_gradient_checkpointing": True,
        "critic_gradient_checkpointing": True,
    }


def plan(flags: dict[str, Any]) -> MemoryPlan:
    """The plan of these flags on this device."""
    machine: dict[str, Any] = {"gpu": "cpu"}
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(distributed.device()).total_memory
        machine = {"gpu": "h100-80g", "gpu_memory_gib": memory / GIB}
    step = {"stage": 3, "enable_hybrid_engine": True, "per_device_generation_batch_size": NUM_PROMPTS}
    return MemoryPlan(plan_run(flags | step | machine))


def run_ppo(args: Any) -> dict[str, Any]:
    """Seconds of a PPO step, and its measured and planned peaks of device memory in GiB."""
    gc.collect()  # frees the decoders' models
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        for name, size, kind in (
            ("actor", "1.3b", AutoModelForCausalLM),
            ("critic", "350m", AutoModelForSequenceClassification),
        ):
            build_opt(size, kind, is_quick=args.quick).save_pretrained(Path(folder, name))
            build_tokenizer().save_pretrained(Path(folder, name))
        flags = ppo_flags(folder, is_quick=args.quick, with_lora=False)
        if not plan(flags).fits:
            flags = ppo_flags(folder, is_quick=args.quick, with_lora=True)
        peak = plan(flags).peak
        generator = torch.Generator().manual_seed(1)
        prompt = (64, flags["max_prompt_seq_len"])
        rows = torch.randint(FIRST_ID, VOCABULARY, prompt, generator=generator).tolist()
        prompts = [{"row_id": str(i), "input_ids": ids} for i, ids in enumerate(rows)]
        step = our_step(prompts, flags["critic_model_name_or_path"], **flags)
        rates = take_turns({"ours": lambda: timed(step)}, args.runs)
    print_rates(f"a PPO step{', LoRA' if flags['actor_lora_dim'] else ''}", rates, "ours", "seconds")
    results = {"rates": rates, "lora_dim": flags["actor_lora_dim"]}
    results["planned_gib"] = round(sum(v for (_, what), v in peak.gpu.items() if what != "reserved") / GIB, 2)
    if torch.cuda.is_available():
        results["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        print(f"peak memory: {results['peak_gib']} GiB, planned {results['planned_gib']}")
    return results


def main() -> None:
    """Run all sections."""
    args = begin(__doc__, 5)
    results = {"decode": run_decode(args), "ppo": run_ppo(args)}
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
