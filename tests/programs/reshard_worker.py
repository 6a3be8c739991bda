"""Reshard real ZeRO 3 engines on every rank, and compare each slice with that of the gathered weight.

torchrun --nproc_per_node N reshard_worker.py LLAMA GPT2

Prints a line for each case that is right; the first wrong one ends the run.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from benchmarks.bench_reshard import SwitchMeter  # noqa: E402
from common.engine.ds_config import EngineOptions, build_train_config  # noqa: E402
from common.engine.optim import build_engine  # noqa: E402
from common.generation.reshard_plan import TPLayout, group_by_layers  # noqa: E402
from common.generation.resharder import Resharder, TPGroups  # noqa: E402
from common.generation.tp_plans import Cut  # noqa: E402
from common.models.loading import ModelOptions, compute_logits, load_causal_lm  # noqa: E402
from common.models.trained_weights import TrainedWeight  # noqa: E402
from common.programs import startup  # noqa: E402
from common.ranks import distributed  # noqa: E402
from common.ranks.zero3 import gather_whole  # noqa: E402
from step1_sft.arguments import SFTArguments  # noqa: E402

IDS = torch.arange(1, 13).view(2, 6)
ROWS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
COLUMNS = ("o_proj.weight", "down_proj.weight")


def shares(size: int, tp_size: int) -> list[tuple[int, int]]:
    """Return runs that are as even as can be."""
    ends = [size * j // tp_size for j in range(tp_size + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def cut_llama(name: str, shape: tuple[int, ...], tp_size: int) -> Cut | None:
    """Cut as a tensor-parallel Llama is."""
    if name.endswith((*ROWS, "embed_tokens.weight", "lm_head.weight")):
        return Cut(0, tuple((run,) for run in shares(shape[0], tp_size)))
    if name.endswith(COLUMNS):
        return Cut(1, tuple((run,) for run in shares(shape[1], tp_size)))
    return None


def cut_gpt2(name: str, shape: tuple[int, ...], tp_size: int) -> Cut | None:
    """Cut as a tensor-parallel GPT-2 is, whose weights lie the other way round; uneven embeddings too."""
    dim = len(shape) - 1
    if "c_attn" in name:
        part = shape[dim] // 3
        runs = shares(part, tp_size)
        return Cut(dim, tuple(tuple((k * part + a, k * part + b) for k in range(3)) for a, b in runs))
    if "c_fc" in name:
        return Cut(dim, tuple((run,) for run in shares(shape[dim], tp_size)))
    if name.endswith(("c_proj.weight", "wte.weight")):
        return Cut(0, tuple((run,) for run in shares(shape[0], tp_size)))
    return None


def build(folder: str, num_tokens: int, *, persistence: int | None, dtype: str, offload: str):
    """Return a ZeRO 3 engine; `persistence` None leaves the threshold as it is."""
    zero = {} if persistence is None else {"stage3_param_persistence_threshold": persistence}
    options = EngineOptions(
        zero_stage=3,
        dtype=dtype,
        offload=offload,
        world_size=distributed.world_size(),
        overrides={"zero_optimization": zero},
    )
    ds_config = build_train_config(options)
    model = load_causal_lm(ModelOptions(folder, dtype=dtype, dropout=0.0, ds_config=ds_config), num_tokens)
    return build_engine(
        model,
        ds_config,
        SFTArguments(learning_rate=1e-2, lora_learning_rate=1e-2, lr_scheduler_type="constant"),
        10,
    )


def train_once(engine) -> None:
    """Do one update."""
    engine.train()
    loss = compute_logits(engine, IDS, torch.ones_like(IDS)).float().square().mean()
    engine.backward(loss)
    engine.step()


def count_whole(parameters: dict[str, nn.Parameter]) -> int:
    """Return how many small weights every rank holds whole at this moment."""
    return sum(p.ds_status is ZeroParamStatus.AVAILABLE for p in parameters.values())


def check_load(resharder: Resharder, parameters) -> dict[str, torch.Tensor]:
    """Return the slices of one load, whose traffic and memory are compared with what was there."""
    held_before = resident_bytes(parameters)
    # Buffers that an earlier load left behind are not new, but held all the same.
    held_before += sum(buffer.nbytes for buffer in resharder._staging.values())
    with SwitchMeter() as meter:
        slices = {name: weight.parameter for name, weight in resharder.load()}
    assert meter.received_bytes == resharder.costs.received_bytes
    assert held_before + meter.peak_bytes <= resharder.costs.peak_bytes * 1.01 + 2048
    assert list(slices) == list(parameters)
    return slices


def check_slices(slices: dict[str, torch.Tensor], parameters, cuts: dict[str, Cut], tp_rank: int) -> None:
    """Compare with the gathered weights. Gathering also ends the time of small weights as whole ones."""
    for name, parameter in parameters.items():
        with torch.no_grad(), gather_whole([parameter]):
            whole = parameter.data.clone()
        wanted = cuts[name].take(whole, tp_rank) if name in cuts else whole
        assert torch.equal(slices[name], wanted) and slices[name].is_contiguous(), name
        assert slices[name].dtype == parameter.dtype


def resident_bytes(parameters: dict[str, nn.Parameter]) -> int:
    """Return what the trainer holds: shards, and weights that are whole at this moment."""
    return sum(p.ds_tensor.nbytes + p.data.nbytes for p in parameters.values())


def check_bounds(resharder: Resharder, parameters, cuts: dict[str, Cut], layout: TPLayout) -> None:
    """Compare with the formulas, for weights that are all sharded.

    Received: (N-t)/(N t) of what is cut, (N-1)/N of what is not, and for columns the difference
    (N-1)/(N t) - (N-t)/(N t) = (t-1)/(N t). Held: shards, slices, and the buffers of one group.
    """
    n, t = layout.world_size, layout.tp_size
    sizes = {name: p.ds_numel * p.element_size() for name, p in parameters.items()}
    of_cut = sum(sizes[name] for name in cuts)
    of_columns = sum(sizes[name] for name, cut in cuts.items() if cut.dim == 1)
    uncut = sum(sizes.values()) - of_cut
    by_formula = (n - t) / (n * t) * of_cut + (n - 1) / n * uncut + (t - 1) / (n * t) * of_columns
    received = sum(distributed.gather_objects(resharder.costs.received_bytes)) / n
    assert abs(received - by_formula) <= 0.1 * by_formula, (received, by_formula)
    shards = sum(p.ds_tensor.nbytes for p in parameters.values())
    largest = max(sum(sizes[name] for name in names) for names in group_by_layers(list(parameters), t))
    assert resharder.costs.peak_bytes <= shards + of_cut / t * 1.05 + uncut + 2 * largest


def check_sizes(engine, make_cut, what: str, *, are_all_sharded: bool) -> None:
    """Check all tensor-parallel sizes before and after an update, and that buffers stay where they are."""
    parameters = dict(engine.module.named_parameters())
    world_size = distributed.world_size()
    resharders = {}
    for tp_size in (size for size in range(1, world_size + 1) if world_size % size == 0):
        layout = TPLayout(world_size, tp_size, distributed.rank())
        made = {name: make_cut(name, tuple(p.ds_shape), tp_size) for name, p in parameters.items()}
        cuts = {name: cut for name, cut in made.items() if cut}
        groups = TPGroups(layout)
        assert (groups.tp_group is None) == (tp_size == 1)
        assert (groups.gather_group is None) == (tp_size == world_size)
        weights = {name: TrainedWeight(p) for name, p in parameters.items()}
        moved = Resharder(weights, cuts, layout, groups, gather_partition_size=tp_size)
        resharders[tp_size] = (moved, cuts, layout)
    before: dict[int, dict[str, torch.Tensor]] = {}
    for is_trained in (False, True):
        if is_trained:
            train_once(engine)
        num_whole, slices = count_whole(parameters), {}
        for tp_size, (resharder, cuts, layout) in resharders.items():
            slices[tp_size] = check_load(resharder, parameters)
            if are_all_sharded:
                check_bounds(resharder, parameters, cuts, layout)
            check_load(resharder, parameters)
        for tp_size, (_, cuts, layout) in resharders.items():
            check_slices(slices[tp_size], parameters, cuts, layout.tp_rank)
            copies = {name: tensor.clone() for name, tensor in slices[tp_size].items()}
            if is_trained:
                assert any(not torch.equal(copies[name], before[tp_size][name]) for name in copies)
            before[tp_size] = copies
        distributed.barrier()
        if distributed.is_main():
            sizes = list(resharders)
            print(f"ok {what} sizes {sizes} trained {is_trained} whole {num_whole}", flush=True)
    moved.release()
    assert not moved._staging


def main() -> None:
    """Check all cases."""
    llama, gpt2 = sys.argv[1:]
    startup.quiet_libraries()
    distributed.start()
    cases = (
        ("llama", llama, 320, cut_llama, {"persistence": 0, "dtype": "fp32", "offload": "none"}),
        ("gpt2", gpt2, 323, cut_gpt2, {"persistence": 0, "dtype": "fp32", "offload": "none"}),
        ("gpt2-small-whole", gpt2, 320, cut_gpt2, {"persistence": None, "dtype": "fp32", "offload": "none"}),
        ("llama-bf16-offload", llama, 320, cut_llama, {"persistence": 99, "dtype": "bf16", "offload": "all"}),
    )
    for what, folder, num_tokens, make_cut, options in cases:
        assert AutoConfig.from_pretrained(folder).vocab_size <= num_tokens
        engine = build(folder, num_tokens, **options)
        check_sizes(engine, make_cut, what, are_all_sharded=options["persistence"] == 0)
        engine.destroy()
    distributed.stop()


if __name__ == "__main__":
    main()
