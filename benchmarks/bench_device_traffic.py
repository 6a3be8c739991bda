#!/usr/bin/env python
"""Host work per token step and per micro-batch on a GPU: waits, copies and launches. Counts, not times.

    python benchmarks/bench_device_traffic.py [--quick]

Counted on the pretended GPU of the tests: CPU tensors that report cuda:0. The model is a Llama with the heads
and the vocabulary of Llama-3.2-1B, 2 layers and an eighth of its width (counts do not depend on widths);
bf16, ZeRO 1, padded micro-batches of 2 short rows, 8 running sequences. Costs are differences: of a
micro-batch between optimizer steps of three and of one, of a layer between models of 2 layers and of 1, of a
token step between responses of 33 and of 17 tokens.

  wait     the host synchronizes with the device, so it cannot queue work ahead
  launch   an operation that would launch a kernel; a captured graph counts as one

The last line is a JSON object. `ours` is the launches of a token step with a graph, `peer` those of the same
step without one; `train_waits` the most waits of any optimizer step of three micro-batches.
"""

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for the pretended GPU

import torch
from pretended_gpu import pretended_gpu
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.measuring import begin, print_result, print_table
from benchmarks.workload import TINY, small_llama_config
from common.data.collators import collate_pairs, collate_sft
from common.data.packed_batch import PackedBatch
from common.engine.ds_config import build_config, build_engine
from common.engine.engine_step import take_steps
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.models import attention
from common.models.loading import DTYPES
from common.models.policy_model import PolicyModel
from common.models.value_model import ScoreHead, ValueModel
from step1_sft.arguments import SFTArguments
from step1_sft.sft_trainer import SFTTrainer
from step2_reward.arguments import RewardArguments
from step2_reward.pair_trainer import RewardTrainer
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.policy_losses import build_policy_loss
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController
from step3_ppo.roles import Critic, Policy, Roles

SHAPE = {"hidden_size": 256, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 1024}
SHAPE |= {"vocab_size": 128256, "tie_word_embeddings": True}
NUM_ROWS, NUM_TOKENS = 2, 16  # of a micro-batch; counts do not depend on them
MICRO = "sft: a micro-batch"
SLOTS = 8
PROMPT = 8
ANSWERS = (17, 33)


class Traffic(NamedTuple):
    """Host work."""

    waits: float
    copies: float
    copied_bytes: float
    launches: float

    def per(self, less: "Traffic", times: int) -> "Traffic":
        """The difference to `less`, divided by `times`."""
        return Traffic(*((a - b) / times for a, b in zip(self, less, strict=True)))


def count(gpu: Any, run: Callable[[], Any]) -> Traffic:
    """Traffic of `run`."""
    gpu.clear()
    run()
    copied = [copy.num_bytes for copy in gpu.copies]
    return Traffic(len(gpu.waits), len(copied), sum(copied), gpu.launches.total())


def make_rollout(first: int) -> PackedBatch:
    """A rollout batch of `NUM_ROWS` rows with all keys that a PPO update reads."""
    num_response = torch.full((NUM_ROWS,), NUM_TOKENS // 2)
    ids = torch.arange(NUM_ROWS * NUM_TOKENS // 2) % 8 + 4
    batch = PackedBatch(tuple(range(first, first + NUM_ROWS)), {}, {})
    for key in ("prompt_ids", "response_ids"):
        batch = batch.with_key(key, ids, lengths=num_response)
    for key in ("old_values", "returns", "advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs"):
        batch = batch.with_key(key, torch.linspace(-2, -1, len(ids)), like="response_ids")
    for key, kind in (("loss_mask", torch.bool), ("loss_weights", torch.float32)):
        batch = batch.with_key(key, torch.ones(len(ids), dtype=kind), like="response_ids")
    return batch.with_numbers("loss_counts", num_response.double())


def text_rows(first: int) -> list[dict[str, Any]]:
    """`NUM_ROWS` rows of text, as in steps 1 and 2."""
    ids = [4 + i % 4 for i in range(NUM_TOKENS)]
    start = {"margin": 0.0}
    start |= {"chosen_response_start": 4, "rejected_response_start": 4}
    rejected = [*ids[:6], 9, *ids[7:-3]]
    row = {"input_ids": ids, "loss_mask": [True] * NUM_TOKENS, "chosen_ids": ids, "rejected_ids": rejected}
    return [row | start | {"row_id": str(first + i)} for i in range(NUM_ROWS)]


def build_steps(kind: str, stage: int = 1, dtype: str = "bf16", **shape: Any) -> dict[str, Callable]:
    """{name: function that runs an optimizer step, or scores, n micro-batches} for a policy or a value model
    by `kind`; a context with a pretended GPU.
    """
    attention.install()  # as loading a model does
    config = small_llama_config(num_labels=1, **shape)
    is_policy = kind == "policy"
    torch.manual_seed(0)
    model = (LlamaForCausalLM if is_policy else LlamaForSequenceClassification)(config).to(DTYPES[dtype])
    if is_policy:
        model = PolicyModel(model, num_valid_tokens=config.vocab_size)
    else:
        model.score.__class__ = ScoreHead
        model = ValueModel(model)
    args = (SFTArguments if is_policy else RewardArguments)(lr_scheduler_type="constant")
    engine = build_engine(model, build_config(zero_stage=stage, dtype=dtype), args, 10)
    role = (Policy if is_policy else Critic)(engine, False)
    trainer_class, collate = (SFTTrainer, collate_sft) if is_policy else (RewardTrainer, collate_pairs)
    trainer = trainer_class(engine, args, is_packed=False, logger=SimpleNamespace(log=lambda *_: None))
    ppo_args = fill_defaults(PPOArguments(), ALGORITHMS["ppo"])
    roles = Roles(role, role, role, {})
    losses = PPOLosses(ppo_args, roles, KLController(0.1), build_policy_loss(ppo_args))
    compute = losses.compute_actor_gradients if is_policy else losses.compute_critic_gradients
    name, of_ppo = ("sft", "ppo actor") if is_policy else ("reward", "ppo critic")
    return {
        name: lambda n: trainer.train_step(1, [collate(text_rows(i)) for i in range(n)]),
        of_ppo: lambda n: take_steps([compute([make_rollout(i) for i in range(n)])]),
        f"{of_ppo}'s scores": lambda n: role.score([make_rollout(i) for i in range(n)]),
    }


def count_training(shape: dict[str, Any]) -> dict[str, Traffic]:
    """Cost of each kind of step, by name: per micro-batch, and of a step of three."""
    counts = {}
    for kind in ("policy", "value"):
        with pretended_gpu() as gpu:
            for name, step in build_steps(kind, **shape).items():
                step(1)  # allocates the optimizer's moments
                one, three = (count(gpu, functools.partial(step, n)) for n in (1, 3))
                counts |= {f"{name}: a micro-batch": three.per(one, 2), f"{name}: three": three}
            del step
        gc.collect()
    return counts


def count_decoding(shape: dict[str, Any]) -> dict[str, Traffic]:
    """Cost of a token step of all slots, with and without a graph."""
    counts = {}
    ids = torch.arange(SLOTS * PROMPT).view(SLOTS, PROMPT) % 8 + 4
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_llama_config(**shape)).to(torch.bfloat16).eval()
    with pretended_gpu() as gpu:
        model.to("cuda")
        for way in ("by a graph", "plainly"):
            generator = Generator(share_weights(model), use_cuda_graphs=way == "by a graph")

            def generate(length: int, generator: Generator = generator) -> None:
                prompts = ids.to("cuda"), torch.ones_like(ids, dtype=torch.bool).to("cuda")
                options = SamplingOptions(ANSWERS[1], stop_token_id=-1, pad_token_id=0)
                names = torch.arange(SLOTS, device="cuda")
                batch = PromptBatch(*prompts, names, torch.full_like(names, length))
                generator.generate(batch, options)

            for length in 2 * ANSWERS:  # twice, to capture all graphs before counting
                generate(length)
            short, long = (count(gpu, functools.partial(generate, length)) for length in ANSWERS)
            counts[f"a token step, {way}"] = long.per(short, ANSWERS[1] - ANSWERS[0])
    return counts


def main() -> None:
    """Count, print a row for each, and the last line."""
    args = begin(__doc__)
    shape = TINY if args.quick else SHAPE
    rows = []
    for layers in (1, 2):
        sized = shape | {"num_hidden_layers": layers}
        rows.append(count_training(sized) | count_decoding(sized))
    one, two = rows
    table = []
    for name, traffic in two.items():
        per_layer = traffic.launches - one[name].launches
        table.append({"2 layers": name} | traffic._asdict() | {"launches a layer": per_layer})
    print_table(table)
    plain, graph = (f"a token step, {way}" for way in ("plainly", "by a graph"))
    print_result(
        "device_traffic",
        two[graph].launches,
        two[plain].launches,
        is_lower_better=True,
        runs=1,
        train_waits=max(traffic.waits for name, traffic in two.items() if name.endswith(": three")),
        decode_waits=two[graph].waits,
        train_launches_per_layer=two[MICRO].launches - one[MICRO].launches,
        decode_launches_per_layer=two[plain].launches - one[plain].launches,
        traffic={name: traffic._asdict() for name, traffic in two.items()},
    )


if __name__ == "__main__":
    main()
