#!/usr/bin/env python
"""Where the time of a step goes: SFT, reward, DPO and PPO steps and decoding, by kind of operation.

python benchmarks/bench_profile.py [--model smollm2] [--dtype bf16] [--quick]

torch's profiler records one pass over 16 rows of bench_train.py, a PPO step of bench_ppo_step.py
and the chat prompts of bench_generate.py, each after a warm-up, on one thread. Columns are shares of the
time that operations take themselves, by kind; `host` is the rest of the processor time: Python, DeepSpeed and
autograd between operations. Below them stand the functions, ours or a transformers model's, whose forward
operations take longest; operations of the backward pass have no function.

The last line is a JSON object; its `ratio` is the share of matrix products in an SFT step.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # when run as a script

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from benchmarks import bench_generate, bench_ppo_step, bench_train, workload
from benchmarks.measuring import begin, print_result, print_table
from common.generation.generate import Generator
from common.generation.inference_module import share_weights
from common.models.loading import DTYPES

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::"),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer": ("aten::_fused_adamw",),
    "copies, joins": (
        "aten::copy_",
        "aten::cat",
        "aten::index",
        "aten::_index",
        "aten::fill_",
        "aten::scatter",
    ),
}
OURS = ("common/", "step1_sft/", "step2_reward/", "step3_ppo/")
NUM_FUNCTIONS = 6


def kind_of(name: str) -> str:
    """Kind of an operation; "small operations" if it has none of `KINDS`."""
    return next((kind for kind, starts in KINDS.items() if name.startswith(starts)), "small operations")


def function_of(stack: list[str]) -> str:
    """The innermost function of ours, or of a transformers model, in a stack; "" without one."""
    for frame in stack:
        file, _, rest = frame.partition("(")
        if file.startswith(OURS) or "transformers/models/" in file:
            return f"{rest.partition(': ')[2]} ({Path(file).name})"
    return ""


def profile_pass(run: Callable[[], Any]) -> dict[str, Any]:
    """Shares of a pass by kind, and the functions with the longest operations."""
    run()
    config = _ExperimentalConfig(verbose=True)
    started = time.process_time()
    with profile(activities=[ProfilerActivity.CPU]):
        run()
    seconds = time.process_time() - started
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=config) as recorded:
        run()
    kinds: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for event in recorded.events():
        if event.name.startswith(("aten::", "mkldnn::")):
            kinds[kind_of(event.name)] += event.self_cpu_time_total / 1e6
            functions[function_of(event.stack)] += event.self_cpu_time_total / 1e6
    del functions[""]
    seconds = max(seconds, kinds.total())
    shares = {kind: round(kinds[kind] / seconds, 3) for kind in (*KINDS, "small operations")}
    shares["host"] = round(1 - kinds.total() / seconds, 3)
    longest = {name: round(spent / seconds, 3) for name, spent in functions.most_common(NUM_FUNCTIONS)}
    return {"seconds": round(seconds, 2), "shares": shares, "functions": longest}


def build_passes(args: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """The passes by section; each is built when it is called first."""
    sizes = workload.sizes_of(args.model, is_quick=args.quick)
    models = workload.save_models(folder, 0, **sizes)
    num_tokens = sizes.get("vocab_size", workload.VOCABULARY)
    passes: dict[str, Callable[[], Any]] = {}
    for section in ("sft", "reward", "dpo"):
        build_rows = workload.sft_rows if section == "sft" else workload.pair_rows
        rows = build_rows(bench_train.ROWS_PER_STEP, seed=1)
        model = models["reward" if section == "reward" else "policy"]
        options = {"is_packed": True, "dtype": args.dtype, "num_tokens": num_tokens}
        passes[section] = bench_train.our_pass(section, rows, model, **options)
    prompts = workload.ppo_prompts(64, 1, bench_ppo_step.MAX_PROMPT)
    passes["ppo"] = bench_ppo_step.our_step(
        prompts,
        models["reward"],
        actor_model_name_or_path=models["policy"],
        critic_model_name_or_path=models["value"],
        max_prompt_seq_len=bench_ppo_step.MAX_PROMPT,
        max_answer_seq_len=bench_ppo_step.MAX_RESPONSE,
        per_device_training_batch_size=bench_ppo_step.NUM_PROMPTS,
        ppo_epochs=bench_ppo_step.PPO_EPOCHS,
        kl_coef=0.05,
        dtype=args.dtype,
        packed=True,
    )
    policy = LlamaForCausalLM.from_pretrained(models["policy"], trust_remote_code=False).eval()
    for name, num_slots in (("decoding, 64 slots", 64), ("decoding, one prompt", 1)):
        work = bench_generate.chat_workload(is_quick=args.quick)
        work = work if num_slots > 1 else work.part(slice(0, 1))
        generator = Generator(share_weights(policy.to(DTYPES[args.dtype])), num_slots=num_slots)
        passes[name] = lambda generator=generator, work=work: bench_generate.run_ours(generator, work)
    return passes


def main() -> None:
    """Profile all passes."""
    args = begin(__doc__, has_models=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sections = {name: profile_pass(run) for name, run in build_passes(args, folder).items()}
    print_table([{"step": name, "seconds": s["seconds"]} | s["shares"] for name, s in sections.items()])
    for name, section in sections.items():
        longest = ", ".join(f"{function} {share:.1%}" for function, share in section["functions"].items())
        print(f"{name}: {longest}")
    sizes = workload.sizes_of(args.model, is_quick=args.quick)
    print_result(
        "profile",
        sections["sft"]["shares"]["products"],
        1.0,
        runs=1,
        model=f"random Llama, {workload.size_of(args.dtype, **sizes)}",
        sections=sections,
    )


if __name__ == "__main__":
    main()
