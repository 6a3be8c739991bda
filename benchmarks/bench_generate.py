#!/usr/bin/env python
"""Generation: useful response tokens per second, transformers' generate against our decoder.

python benchmarks/bench_generate.py [--model smollm2] [--dtype bf16] [--quick]

Sections; the ways of each take turns in one run:
  chat    64 prompts of 8-64 tokens, responses of 4-128 tokens like those of a chat model (mean about 33);
          generate at every batch size, DeepSpeed's HybridEngineRollout, transformers' continuous batching
          (generate_batch) and our decoder at several slot counts
  fixed   the same prompts, 32 tokens each
  zero3   the chat prompts on two ranks of ZeRO 3: generate on sharded weights, generate on gathered ones
          (a plain module, no hooks), the hybrid engine with its switch
  server  32 clients in threads, 16 tokens each, of a server that answers one by one, and together
  single  the first prompt only: the weights' bytes per token times tokens/s, over copy bandwidth
The model is a random Llama (6 layers, hidden 256, vocabulary 8192, fp32; with --model smollm2, the default on
a GPU, SmolLM2-135M's shape; zero3 needs two GPUs). Response lengths are prescribed, as if EOS were at that
position, because random weights do not produce meaningful EOS tokens. The last line is a JSON object; its
`ratio` is our best over transformers' best on the chat lengths.

# B prompts, P prompt, R response
"""

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM, StoppingCriteriaList

from benchmarks.measuring import (
    PeakShares,
    Rates,
    best,
    copy_bandwidth,
    print_rates,
    print_result,
    read_args,
    take_turns,
    timed,
)
from benchmarks.several_ranks import run_ranks
from benchmarks.workload import size_of, sizes_of, small_llama_config
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.generation.inference_module import share_weights
from common.generation.request_loop import Request, SharedGenerator
from common.models.loading import DTYPES
from common.models.model_flops import ModelFlops
from common.ranks import distributed

VOCABULARY, PAD = 8192, 0
NUM_PROMPTS = 64
PROMPT_TOKENS = (8, 64)
FIXED_TOKENS = 32
QUICK_PROMPTS, QUICK_TOKENS = 8, 16
CLIENTS = ((32, 16), (4, 4))  # and tokens of each; the second with --quick
COPIED_BYTES = (2**28, 2**24)  # the second with --quick
BATCH_SIZES = (8, 16, 32, 64)
SLOTS = (16, 64)
PAGE_TOKENS, PASS_TOKENS = 32, 512  # of continuous batching


@dataclass(frozen=True)
class Workload:
    """Left-padded prompts and the length of each response."""

    prompt_ids: torch.Tensor  # (B, P) int64
    prompt_mask: torch.Tensor  # (B, P) int64
    lengths: torch.Tensor  # (B,) int64, response tokens

    def part(self, rows: slice) -> "Workload":
        """Some of the prompts, trimmed to the width of the longest."""
        width = int(self.prompt_mask[rows].sum(1).max())
        return Workload(self.prompt_ids[rows, -width:], self.prompt_mask[rows, -width:], self.lengths[rows])


def chat_workload(*, is_quick: bool) -> Workload:
    """Random prompts, with response lengths of a chat model: many short, few long, mean about 33."""
    generator = torch.Generator().manual_seed(1)
    draw = 4 - 26 * (1 - torch.rand(NUM_PROMPTS, generator=generator)).log()
    lengths = draw.long().clamp(4, 128)
    lengths[0] = 128
    if is_quick:
        lengths = lengths[:QUICK_PROMPTS].clamp(max=QUICK_TOKENS)
    generator = torch.Generator().manual_seed(1)
    low, high = PROMPT_TOKENS
    prompt_lengths = torch.randint(low, high + 1, (len(lengths),), generator=generator)
    width = int(prompt_lengths.max())
    mask = (torch.arange(width) >= width - prompt_lengths.unsqueeze(1)).long()
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    device = distributed.device()
    return Workload(ids.to(device), mask.to(device), lengths.to(device))


def has_ended(work: Workload, ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
    """Whether each response has reached its length."""
    return ids.shape[1] - work.prompt_ids.shape[1] >= work.lengths


def run_transformers(model: Any, work: Workload, batch_size: int, **options: Any) -> None:
    """Sample all responses by transformers' `generate`, `batch_size` prompts at a time."""
    for start in range(0, len(work.lengths), batch_size):
        part = work.part(slice(start, start + batch_size))
        model.generate(
            part.prompt_ids,
            attention_mask=part.prompt_mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=int(part.lengths.max()),
            pad_token_id=PAD,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([partial(has_ended, part)]),
            **options,
        )


def time_continuous_batching(model: Any, work: Workload, num_slots: int) -> float:
    """Seconds of transformers' continuous batching for all responses, `num_slots` at a time.

    Its thread starts with an untimed first response and ends after the timing: an idle thread slows the rest
    of the process by a third. Its cache has room for `num_slots` of the longest responses; by default it
    would take most of the memory.
    """
    model = copy.deepcopy(model)  # its attention implementation changes during generation
    rows = zip(work.prompt_ids, work.prompt_mask.bool(), work.lengths.tolist(), strict=True)
    requests = [(ids[mask].tolist(), length) for ids, mask, length in rows]
    longest = max(len(ids) + length for ids, length in requests)
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=num_slots * -(-longest // PAGE_TOKENS),
        max_batch_tokens=PASS_TOKENS,
        max_requests_per_batch=num_slots,
    )
    options = GenerationConfig(do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=-1)

    with model.continuous_batching_context_manager(options, continuous_batching_config=config) as manager:

        def run(requests: list[tuple[list[int], int]]) -> None:
            for ids, length in requests:
                manager.add_request(ids, max_new_tokens=length)
            results = [len(manager.get_result().generated_tokens) for _ in requests]
            if sorted(results) != sorted(length for _, length in requests):
                raise AssertionError("response lengths differ from those requested")

        run(requests[:1])
        return timed(run, requests)


def run_ours(generator: Generator, work: Workload) -> None:
    """Sample all responses by our decoder, log-probabilities included."""
    options = SamplingOptions(int(work.lengths.max()), stop_token_id=-1, pad_token_id=PAD)
    sample_ids = torch.arange(len(work.lengths), device=work.lengths.device)
    batch = PromptBatch(work.prompt_ids, work.prompt_mask, sample_ids, work.lengths)
    results = generator.generate(batch, options)
    if not results.response_mask.sum(1).equal(work.lengths):
        raise AssertionError("response lengths differ from those requested")


def deepspeed_rollout(model: Any, work: Workload) -> Callable[[], None]:
    """DeepSpeed's own rollout of all responses; it always decodes up to the longest one."""
    from deepspeed.runtime.rollout import HybridEngineRollout, RolloutRequest, SamplingConfig

    engine = SimpleNamespace(module=model)  # all that it needs of an engine
    rollout = HybridEngineRollout(engine, SimpleNamespace(pad_token_id=PAD, eos_token_id=None))
    request = RolloutRequest(work.prompt_ids, work.prompt_mask)
    sampling = SamplingConfig(max_new_tokens=int(work.lengths.max()))
    return lambda: rollout.generate(request, sampling)


def measure(ways: dict[str, Callable[[], float]], work: Workload, num_runs: int) -> Rates:
    """Response tokens per second of each way, a function that returns seconds."""
    num_tokens = int(work.lengths.sum())
    rates = {name: lambda run=run: num_tokens / run() for name, run in ways.items()}
    return take_turns(rates, num_runs)


def compare(model: Any, work: Workload, num_runs: int, title: str, *, with_deepspeed: bool) -> dict[str, Any]:
    """The rates of one process on a workload, and the ratio."""
    ways: dict[str, Callable[[], float]] = {}
    for size in (size for size in BATCH_SIZES if size <= len(work.lengths)):
        ways[f"generate, batch {size}"] = partial(timed, run_transformers, model, work, size)
    if with_deepspeed:
        ways["DeepSpeed HybridEngineRollout"] = partial(timed, deepspeed_rollout(model, work))
    lent = share_weights(model)
    for slots in SLOTS:
        ways[f"generate_batch, {slots} slots"] = partial(time_continuous_batching, model, work, slots)
        generator = Generator(lent, num_slots=slots)
        ways[f"ours, {slots} slots"] = partial(timed, run_ours, generator, work)
    rates = measure(ways, work, num_runs)
    results = {"rates": rates, "ratio": print_rates(title, rates, "generate")}
    shares = PeakShares()
    lengths = (work.prompt_mask.sum(1).cpu(), work.lengths.cpu())
    flops = ModelFlops(model, model.lm_head).of_generation(*lengths, num_samples=1) / int(lengths[1].sum())
    for name, rate in rates.items():
        shares.add(name, flops * rate["median"])
    return results | shares.facts(next(name for name, dtype in DTYPES.items() if dtype == model.dtype))


def run_single(model: Any, work: Workload, num_runs: int, *, is_quick: bool) -> dict[str, Any]:
    """Our rate for the first prompt only, and the share of copy bandwidth at which it reads weights."""
    generator = Generator(share_weights(model), num_slots=1)
    one = work.part(slice(0, 1))
    rates = measure({"ours, one prompt": partial(timed, run_ours, generator, one)}, one, num_runs)
    bandwidth = copy_bandwidth(COPIED_BYTES[is_quick], distributed.device())
    num_bytes = sum(weight.nbytes for weight in model.parameters())  # tied embeddings
    share = round(num_bytes * best(rates, "ours") / bandwidth, 4)
    print(
        f"\none prompt: {best(rates, 'ours'):.1f} tokens/s, {share:.1%} of {bandwidth / 1e9:.1f} GB/s copied"
    )
    return {"rates": rates, "copy_gb_per_second": round(bandwidth / 1e9, 2), "copy_share": share}


def run_server(model: Any, num_runs: int, *, is_quick: bool) -> dict[str, Any]:
    """Rates of clients whose requests share the slots, and of clients who wait for one another."""
    num_clients, num_tokens = CLIENTS[is_quick]
    options = SamplingOptions(num_tokens, stop_token_id=-1, pad_token_id=PAD)

    def serve(shared: SharedGenerator) -> None:
        def ask(client: int) -> None:
            shared.run(Request([*range(1, 9 + client % 8)], [client], options, lambda *_: False, 1))

        with ThreadPoolExecutor(num_clients) as threads:
            list(threads.map(ask, range(num_clients)))

    ways = {}
    for name, max_slots in {"one by one": 1, "ours, together": num_clients}.items():
        limits = {"max_slots": max_slots, "max_length": 64, "max_new_tokens": num_tokens}
        shared = SharedGenerator(share_weights(model), **limits)
        ways[name] = lambda shared=shared: num_clients * num_tokens / timed(serve, shared)
    rates = take_turns(ways, num_runs)
    ratio = print_rates(f"server: {num_clients} clients, {num_tokens} tokens each", rates, "one by one")
    return {"rates": rates, "ratio": ratio}


def run_zero3_rank(engine: Any, num_runs: int, is_quick: bool) -> Rates:
    """Rates of two ranks together: three ways to generate with weights sharded by ZeRO 3."""
    engine.eval()
    whole = chat_workload(is_quick=is_quick)
    work = whole.part(slice(distributed.rank(), None, distributed.world_size()))
    batch_size = len(work.lengths)
    hybrid = HybridEngine(engine, HybridOptions(enable_hybrid_engine=True))
    gathering = HybridEngine(engine, HybridOptions(enable_hybrid_engine=False))

    def on_sharded_weights() -> None:
        run_transformers(engine.module, work, batch_size, synced_gpus=True)

    def on_gathered_weights() -> None:
        with gathering.generation_mode() as module:
            run_transformers(module, work, batch_size)

    def ours() -> None:
        with hybrid.generation_mode():
            run_ours(hybrid.generator, work)

    ways = {
        "generate, sharded weights": on_sharded_weights,
        "generate, gathered weights": on_gathered_weights,
        "ours": ours,
    }
    with torch.no_grad():
        return measure({name: partial(timed, run) for name, run in ways.items()}, whole, num_runs)


def run_zero3(model: Any, num_runs: int, *, is_quick: bool) -> dict[str, Any]:
    """The rates of two ranks together, and the ratios over both of generate's."""
    rates = run_ranks(run_zero3_rank, model, 2, num_runs, is_quick)
    title = "zero3: two ranks, half of the chat prompts each"
    over_gathered = print_rates(title, rates, "generate, gathered")
    over_sharded = round(best(rates, "ours") / best(rates, "generate, sharded"), 4)
    print(f"ours over generate on sharded weights: {over_sharded:.1f}")
    return {"rates": rates, "ratio_over_gathered": over_gathered, "ratio_over_sharded": over_sharded}


def main() -> None:
    """Run all sections."""
    args = read_args(__doc__, 5, has_models=True)
    torch.manual_seed(0)
    dtype = args.dtype
    shape = sizes_of(args.model, is_quick=args.quick)
    shape = shape or {"num_hidden_layers": 6}
    model = LlamaForCausalLM(small_llama_config(tie_word_embeddings=True, **shape)).eval()
    model.to(distributed.device(), DTYPES[dtype])
    work = chat_workload(is_quick=args.quick)
    lengths = work.lengths
    fixed = Workload(work.prompt_ids, work.prompt_mask, torch.full_like(lengths, FIXED_TOKENS))
    spread = f"4 to {lengths.max()} tokens, mean {lengths.float().mean():.1f}"
    title = f"chat: {len(lengths)} prompts, responses of {spread}"
    results = {"chat": compare(model, work, args.runs, title, with_deepspeed=True)}
    title = f"fixed: {len(lengths)} prompts, {FIXED_TOKENS} tokens each"
    results["fixed"] = compare(model, fixed, args.runs, title, with_deepspeed=False)
    results["server"] = run_server(model, args.runs, is_quick=args.quick)
    results["single"] = run_single(model, work, args.runs, is_quick=args.quick)
    if torch.cuda.device_count() != 1:
        results["zero3"] = run_zero3(model, args.runs, is_quick=args.quick)
    print_result(
        "generate",
        best(results["chat"]["rates"], "ours"),
        best(results["chat"]["rates"], "generate"),
        runs=args.runs,
        model=f"random Llama, {size_of(dtype, **shape)}",
        sections=results,
    )


if __name__ == "__main__":
    main()
