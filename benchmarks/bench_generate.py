#!/usr/bin/env python
"""Generation: useful response tokens a second, transformers' generate against our decoder.

python benchmarks/bench_generate.py [--quick] [--model FOLDER] [--sections chat fixed zero3 gpu]

Sections, the ways of each taking turns in one run:
  chat    64 prompts of 8-64 tokens, responses of 4-128 tokens as a chat model gives them (mean about 33);
          generate at every batch size, DeepSpeed's HybridEngineRollout, our decoder at several slot counts
  fixed   the same prompts, 32 tokens each
  zero3   the chat prompts on two ranks of ZeRO 3: generate on sharded weights, generate on gathered ones
          (a plain module, no hooks), the hybrid engine with its switch
  gpu     a model of 1.3 billion weights in bf16, 64 prompts: generate, our decoder, and which share of the
          measured copy bandwidth the decoder reaches. Needs a CUDA GPU with 24 GB.
The model is a random Llama (6 layers, hidden 256, vocabulary 8192, fp32), or that of --model. The last line
is a JSON object; its `ratio` is our best over generate's best on the chat lengths.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.chat_rows import TINY, size_of
from benchmarks.generate_peers import (
    Workload,
    build_deepspeed_rollout,
    build_workload,
    chat_lengths,
    run_ours,
    run_transformers,
)
from benchmarks.peer_process import best, launch_ranks, print_rates, take_turns
from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_engine
from common.generation.generate import Generator
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.generation.inference_module import share_weights
from common.models.loading import ModelOptions, load_causal_lm
from common.programs import startup
from common.ranks import distributed
from step1_sft.arguments import SFTArguments

NUM_PROMPTS, PROMPT_TOKENS, FIXED_TOKENS = 64, (8, 64), 32
QUICK_PROMPTS, QUICK_TOKENS = 8, 16
BATCH_SIZES, SLOTS = (8, 16, 32, 64), (16, 64)
SECTIONS = ("chat", "fixed", "zero3", "gpu")


def small_llama(**changes: Any) -> LlamaConfig:
    """Return the model of the issue's figures: the output head is the embedding."""
    options = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8192}
    return LlamaConfig(**(options | {"max_position_embeddings": 2048, "tie_word_embeddings": True} | changes))


def chat_workload(vocabulary: int, *, is_quick: bool) -> Workload:
    """Return the prompts and lengths of the sections `chat` and `zero3`."""
    lengths = chat_lengths(NUM_PROMPTS, torch.Generator().manual_seed(1))
    if is_quick:
        lengths = lengths[:QUICK_PROMPTS].clamp(max=QUICK_TOKENS)
    return build_workload(lengths, vocabulary=vocabulary, prompt_tokens=PROMPT_TOKENS, seed=1)


def synchronize() -> None:
    """Wait for the device: its work runs behind the host's."""
    if distributed.has_gpu():
        torch.cuda.synchronize()


def timed(run: Callable[[], None], num_tokens: int) -> Callable[[], float]:
    """Return a way that runs once and returns its tokens a second."""

    def measure() -> float:
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        return num_tokens / (time.perf_counter() - started)

    return measure


def compare(model: Any, work: Workload, num_runs: int, title: str, *, with_deepspeed: bool) -> dict[str, Any]:
    """Return the rates of one process on a workload, and the ratio."""
    lent = share_weights(model)
    ways: dict[str, Callable[[], None]] = {}
    for size in (size for size in BATCH_SIZES if size <= len(work.lengths)):
        ways[f"generate, batch {size}"] = lambda size=size: run_transformers(model, work, size)
    if with_deepspeed:
        engine = type("Engine", (), {"module": model})()  # it needs no more of an engine
        rollout = build_deepspeed_rollout(engine)
        ways["DeepSpeed HybridEngineRollout"] = lambda: rollout(work)
    for slots in SLOTS:
        generator = Generator(lent, num_slots=slots)
        ways[f"ours, {slots} slots"] = lambda generator=generator: run_ours(generator, work)
    rates = take_turns({name: timed(run, work.num_tokens) for name, run in ways.items()}, num_runs)
    return {"rates": rates, "ratio": print_rates(title, rates, "generate")}


def run_gpu(num_runs: int) -> dict[str, Any]:
    """Return rates and bandwidth of a 1.3B model on a CUDA device, or what is missing."""
    if not distributed.has_gpu() or torch.cuda.mem_get_info()[0] < 20 * 2**30:
        print("\ngpu: skipped; it needs a CUDA GPU with 24 GB")
        return {"skipped": "needs a CUDA GPU with 24 GB"}
    shape = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "vocab_size": 32000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    config = small_llama(**shape, **heads, tie_word_embeddings=False)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    work = build_workload(
        torch.full((NUM_PROMPTS,), 256), vocabulary=32000, prompt_tokens=(64, 256), seed=2
    ).to(torch.device("cuda"))
    generator = Generator(share_weights(model), num_slots=NUM_PROMPTS)
    ways = {
        "generate, batch 64": lambda: run_transformers(model, work, NUM_PROMPTS),
        "ours, 64 slots": lambda: run_ours(generator, work),
    }
    rates = take_turns({name: timed(run, work.num_tokens) for name, run in ways.items()}, num_runs)
    ratio = print_rates("gpu: 1.3B, bf16, 64 prompts, 256 tokens each", rates, "generate")
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    steps_per_second = best(rates, "ours") / NUM_PROMPTS  # prompts' passes count against us
    kv_bytes = 2 * 24 * 2048 * 2 * float((work.prompt_mask.sum(1) + 128).sum())
    read = steps_per_second * (weight_bytes + kv_bytes)
    share = read / copy_bandwidth()
    print(f"decode reads {read / 1e9:.0f} GB/s: {share:.0%} of the measured copy bandwidth")
    return {"rates": rates, "ratio": ratio, "bandwidth_share": round(share, 4)}


def copy_bandwidth() -> float:
    """Return bytes read and written a second by a copy on the GPU."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.nbytes / (start.elapsed_time(end) / 1e3)


def run_zero3_rank(folder: str, num_runs: int, *, is_quick: bool) -> None:
    """Be one of two ranks: all three ways of generating with weights that ZeRO 3 has sharded."""
    startup.quiet_libraries()
    distributed.start()
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    options = EngineOptions(zero_stage=3, world_size=distributed.world_size(), overrides=threshold)
    ds_config = build_train_config(options)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 1)
    engine = build_engine(
        model,
        ds_config,
        SFTArguments(learning_rate=1e-5, lora_learning_rate=1e-5, lr_scheduler_type="constant"),
        1,
    )
    engine.eval()
    whole = chat_workload(model.config.vocab_size, is_quick=is_quick)
    rows = slice(distributed.rank(), None, distributed.world_size())
    work = whole.part(rows).to(distributed.device())
    batch_size = len(work.lengths)
    hybrid = HybridEngine(engine, HybridOptions(enabled=True))
    gathering = HybridEngine(engine, HybridOptions(enabled=False))

    def on_gathered_weights() -> None:
        with gathering.generation_mode() as module:
            run_transformers(module, work, batch_size)

    def ours() -> None:
        with hybrid.generation_mode():
            run_ours(hybrid.generator, work)

    ways = {
        "generate, sharded weights": lambda: run_transformers(
            engine.module, work, batch_size, synced_gpus=True
        ),
        "generate, gathered weights": on_gathered_weights,
        "ours": ours,
    }
    with torch.no_grad():
        rates = take_turns({name: timed(run, whole.num_tokens) for name, run in ways.items()}, num_runs)
    if distributed.is_main():
        Path(folder, "rates.json").write_text(json.dumps(rates))
    distributed.stop()


def run_zero3(model: Any, num_runs: int, *, is_quick: bool) -> dict[str, Any]:
    """Return the rates of two ranks together, and the ratios over both of generate's."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        words = ["--zero3_folder", folder, "--runs", str(num_runs), *(["--quick"] if is_quick else [])]
        launch_ranks(__file__, 2, words, limit_seconds=1800)
        rates = json.loads(Path(folder, "rates.json").read_text())
    title = "zero3: two ranks, half of the chat prompts each"
    over_gathered = print_rates(title, rates, "generate, gathered")
    over_sharded = round(best(rates, "ours") / best(rates, "generate, sharded"), 4)
    print(f"ours over generate on sharded weights: {over_sharded:.1f}")
    return {"rates": rates, "ratio_over_gathered": over_gathered, "ratio_over_sharded": over_sharded}


def main() -> None:
    """Run the sections that were asked for, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, few and short responses, one round"
    )
    parser.add_argument("--runs", type=int, default=0, help="measured rounds (5; 1 with --quick)")
    parser.add_argument("--model", default="", help="a model folder in place of the random Llama")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--zero3_folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_runs = args.runs or (1 if args.quick else 5)
    if args.zero3_folder:
        run_zero3_rank(args.zero3_folder, num_runs, is_quick=args.quick)
        return
    startup.quiet_libraries()
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(small_llama(**(TINY if args.quick else {})))
    model.eval()
    work = chat_workload(model.config.vocab_size, is_quick=args.quick)
    lengths = work.lengths
    found: dict[str, Any] = {}
    if "chat" in args.sections:
        spread = f"4 to {lengths.max()} tokens, mean {lengths.float().mean():.1f}"
        title = f"chat: {len(lengths)} prompts, responses of {spread}"
        found["chat"] = compare(model, work, num_runs, title, with_deepspeed=True)
    if "fixed" in args.sections:
        fixed = Workload(work.prompt_ids, work.prompt_mask, torch.full_like(lengths, FIXED_TOKENS))
        title = f"fixed: {len(lengths)} prompts, {FIXED_TOKENS} tokens each"
        found["fixed"] = compare(model, fixed, num_runs, title, with_deepspeed=False)
    if "zero3" in args.sections:
        found["zero3"] = run_zero3(model, num_runs, is_quick=args.quick)
    if "gpu" in args.sections:
        found["gpu"] = run_gpu(num_runs)
    rates = found["chat"]["rates"] if "chat" in found else {}
    result = {
        "name": "generate",
        "device": torch.cuda.get_device_name() if distributed.has_gpu() else "cpu",
        "threads": torch.get_num_threads(),
        "ours": best(rates, "ours") if rates else None,
        "peer": best(rates, "generate") if rates else None,
        "ratio": found["chat"]["ratio"] if rates else None,
        "runs": num_runs,
        "model": args.model or f"random Llama, {size_of(model.config)}",
        "sections": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
