"""Counted bytes that gloo ranks receive in a step, compared with tools/traffic_plan.py."""

import contextlib
import json
import os
import socket
import stat
import struct
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from deepspeed import DeepSpeedEngine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.bench_ppo_step import our_step
from benchmarks.bench_train import ROWS_PER_STEP, our_pass
from benchmarks.measuring import plan_run
from benchmarks.several_ranks import received_bytes, start_ranks
from benchmarks.workload import FIRST_ID, build_tokenizer, small_llama_config
from common.models.value_model import ValueModel
from common.ranks import distributed
from common.ranks.step_costs import COSTS
from tools.traffic_plan import plan_traffic

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
NUM_PROMPTS = 4  # per rank
MAX_PROMPT = 16
MAX_RESPONSE = 8  # random weights do not end a response earlier
# As for a model larger than these bounds of ZeRO 3: all weights are sharded, none is kept for its next use,
# and none is prefetched before its previous use is over.
BOUNDS = ("param_persistence_threshold", "max_reuse_distance", "prefetch_bucket_size")
NO_BOUNDS = {"zero_optimization": {f"stage3_{bound}": 0 for bound in BOUNDS}}
PPO = {
    "max_prompt_seq_len": MAX_PROMPT,
    "max_answer_seq_len": MAX_RESPONSE,
    "per_device_training_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "old_logprobs": "recompute",
}


def ppo_flags(stage: int, **more: Any) -> dict[str, Any]:
    """Flags of a PPO step whose trained models use one ZeRO stage."""
    return PPO | {"actor_zero_stage": stage, "critic_zero_stage": stage} | more


# Case: the step, and its flags.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "SFT, ZeRO 2": (1, {"zero_stage": 2, "gradient_accumulation_steps": 2}),
    "SFT, ZeRO 3": (1, {"zero_stage": 3, "gradient_accumulation_steps": 2}),
    "PPO, ZeRO 2, t = 1": (3, ppo_flags(2)),
    "PPO, ZeRO 2, t = 2": (3, ppo_flags(2, inference_tp_size=2)),
    "PPO, ZeRO 3, t = 1": (3, ppo_flags(3)),
    "PPO, ZeRO 3, t = 2": (3, ppo_flags(3, inference_tp_size=2)),
    "PPO, ZeRO 3, t = 2, neighbours, checkpointing": (
        3,
        ppo_flags(
            3, inference_tp_size=2, inference_tp_groups="contiguous", actor_gradient_checkpointing=True
        ),
    ),
    "PPO, ZeRO 3, layer by layer": (3, ppo_flags(3, unpin_actor_parameters=True)),
}
TCP_INFO_BYTES, RECEIVED_AT = 256, 128  # offset of tcpi_bytes_received in linux/tcp.h
# Running clock: the plan's phase.
PHASES = {
    "switch": "switch",
    "generate": "generate",
    "actor_score": "score actor",
    "reference": "score reference",
    "critic": "score critic",
    "reward": "score reward",
    "actor_update": "train actor",
    "critic_update": "train critic",
}


class TrafficMeter(TorchDispatchMode):
    """Context that sums the bytes that this rank receives by collectives, by the plan's phases.

    `received`: bytes of weights, gradients and hidden states, which are fp32 and more than one number.
    `control`: the rest, such as token ids, scores and texts that ranks exchange, and sums of metrics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[str] = Counter()
        self.control: Counter[str] = Counter()
        self.expected_on_wire = 0.0  # gloo's reduce-scatter is an all-reduce: twice the bytes
        self.on_wire = 0  # bytes received by this process's sockets, from the kernel
        self._stepping = ""  # phase of the role whose optimizer step runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its bytes."""
        if func.namespace == "c10d":
            sent = next(t for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            is_planned = sent.dtype == torch.float32 and sent.numel() > 1
            counter = self.received if is_planned else self.control
            counter[self._phase()] += (num_bytes := received_bytes(func, args))
            self.expected_on_wire += num_bytes * (2 if "reduce_scatter" in func._schema.name else 1)
        return func(*args, **(kwargs or {}))

    def _phase(self) -> str:
        clock = COSTS._running
        if clock == "optimizer":  # in step 3, the same clock for both roles
            return self._stepping
        return "train" if clock == "forward_backward" else PHASES.get(clock, "control")

    def __enter__(self) -> Self:
        make_step = DeepSpeedEngine.step

        def step(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
            self._stepping = "train critic" if isinstance(engine.module, ValueModel) else "train actor"
            return make_step(engine, *args, **kwargs)

        self._patch = mock.patch.object(DeepSpeedEngine, "step", step)
        self._patch.start()
        self.on_wire -= wire_bytes()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.on_wire += wire_bytes()
        self._patch.stop()


def wire_bytes() -> int:
    """Bytes that the TCP sockets of this process have received, from the kernel; Linux only."""
    total = 0
    seen = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime, or not a TCP socket
            number = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(number.st_mode) and number.st_ino not in seen:
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                total += struct.unpack_from("Q", info, RECEIVED_AT)[0]
                seen.add(number.st_ino)
    return total


def count_case(case: str, folder: str) -> dict[str, Any]:
    """Bytes that the ranks of a group receive in the second step of a case, by phase. Every rank must call
    this.
    """
    step, flags = CASES[case]
    flags = flags | {"ds_config": f"{folder}/ds.json"}
    rows = [make_row(index) for index in range(4 * ROWS_PER_STEP * distributed.world_size())]
    if step == 1:
        make_step = our_pass("sft", rows[: len(rows) // 2], f"{folder}/policy", is_packed=False, **flags)
    else:
        paths = {"actor": f"{folder}/policy", "critic": f"{folder}/reward"}
        flags |= {f"{role}_model_name_or_path": path for role, path in paths.items()}
        make_step = our_step(rows, paths["critic"], num_prompts=NUM_PROMPTS, dtype="fp32", **flags)
    make_step()  # DeepSpeed records the order of the layers in the first step
    with TrafficMeter() as meter:
        make_step()
    gathered = distributed.gather_objects(
        (meter.received, meter.control, meter.on_wire, meter.expected_on_wire)
    )
    received, control, on_wire, expected = zip(*gathered, strict=True)
    names = sorted({name for counter in received for name in counter})
    largest = {name: max(counter[name] for counter in received) for name in names}
    return {
        "received": largest if step == 3 else {"train": sum(largest.values())},
        "control": max(sum(counter.values()) for counter in control),
        "on_wire": sum(on_wire) / len(on_wire),
        "expected_on_wire": sum(expected) / len(expected),
    }


def make_row(index: int) -> dict[str, Any]:
    """A prompt, or for step 1 a row, of MAX_PROMPT tokens."""
    ids = [FIRST_ID + (7 * index + 3 * position) % 1000 for position in range(MAX_PROMPT)]
    return {"row_id": str(index), "input_ids": ids, "loss_mask": [1] * MAX_PROMPT}


def plan_case(case: str, folder: str, num_ranks: int) -> dict[str, float]:
    """Planned bytes that a rank receives in each phase of a case."""
    step, flags = CASES[case]
    flags = flags | {"stage": step, "gpu": "cpu", "num_gpus": num_ranks, "ds_config": f"{folder}/ds.json"}
    if step == 1:
        flags |= {"model_name_or_path": f"{folder}/policy", "per_device_train_batch_size": ROWS_PER_STEP}
    else:
        flags |= {"actor_model_name_or_path": f"{folder}/policy", "enable_hybrid_engine": True}
        flags |= {"critic_model_name_or_path": f"{folder}/reward"}
        flags |= {"per_device_generation_batch_size": NUM_PROMPTS}
    return {
        name: phase.intra_bytes + phase.inter_bytes for name, phase in plan_traffic(plan_run(flags)).items()
    }


def count_all(cases: list[str], sizes: list[int]) -> list[dict[str, Any]]:
    """A row for each case and number of ranks: planned and counted bytes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        kinds = {"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}
        for name, kind in kinds.items():
            kind(small_llama_config(num_labels=1, **SIZES)).save_pretrained(f"{folder}/{name}")
            build_tokenizer().save_pretrained(f"{folder}/{name}")
        Path(folder, "ds.json").write_text(json.dumps(NO_BOUNDS))
        for num_ranks in sizes:
            counted = start_ranks(_count_cases, num_ranks, cases, folder)
            for case in cases:
                planned = plan_case(case, folder, num_ranks)
                rows.append({"ranks": num_ranks, "case": case, "planned": planned} | counted[case])
    return rows


def _count_cases(cases: list[str], folder: str) -> dict[str, dict[str, Any]]:
    return {case: count_case(case, folder) for case in cases}
