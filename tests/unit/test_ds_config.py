"""DeepSpeed's configuration, and engines of it on a pretended GPU."""

from contextlib import nullcontext

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from pretended_gpu import pretended_gpu
from test_engine_step import SETUPS, Trained

from common.engine.ds_config import build_config, build_engine, merge, with_buckets
from common.engine.engine_step import take_steps
from step1_sft.arguments import SFTArguments

pytestmark = pytest.mark.usefixtures("process_group")


def zero_section(**options) -> dict:
    return build_config(**options)["zero_optimization"]


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"), [(0, "fp32", 0), (0, "bf16", 1), (0, "fp16", 1), (3, "bf16", 3)]
)
def test_bf16_never_runs_without_fp32_master_weights(stage, dtype, expected):
    config = build_config(zero_stage=stage, dtype=dtype)
    assert config["zero_optimization"]["stage"] == expected
    assert ("bf16" in config, "fp16" in config) == (dtype == "bf16", dtype == "fp16")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"offload": "none"}, set()),
        ({"offload": "optimizer"}, {"offload_optimizer"}),
        ({"offload": "param"}, {"offload_param"}),
        ({"offload": "all", "zero_stage": 2}, {"offload_optimizer"}),
        ({"offload": "all"}, {"offload_optimizer", "offload_param"}),
        ({"offload": "all", "is_trained": False}, {"offload_param"}),  # a frozen model has no optimizer
    ],
)
def test_offload_moves_what_the_stage_can_move(options, expected):
    section = zero_section(**{"zero_stage": 3} | options)
    assert {key for key in section if key.startswith("offload")} == expected


def test_stage_3_keeps_deepspeed_chats_thresholds():
    section = zero_section(zero_stage=3)
    assert section["stage3_param_persistence_threshold"] == 1e4
    assert section["stage3_prefetch_bucket_size"] == 3e7
    assert section["memory_efficient_linear"] is False
    assert "stage3_max_live_parameters" not in section  # DeepSpeed's own 1e9


@pytest.mark.parametrize(
    ("stage", "num_trained", "num_ranks", "size", "is_overlapped"),
    [
        (0, 10**9, 8, None, None),
        (1, 999, 1, 1000, None),
        (1, 10**9, 1, 2 * 10**8, None),
        (1, 10**9, 2, 2 * 10**8, True),
        (2, 10**9, 2, 2 * 10**8, True),
        (2, 999, 2, 1000, None),  # one bucket: it is full when the backward pass is over
        (3, 10**9, 2, 2 * 10**8, None),  # DeepSpeed's default is to overlap
    ],
)
def test_buckets_are_no_larger_than_what_is_trained(stage, num_trained, num_ranks, size, is_overlapped):
    section = with_buckets(build_config(zero_stage=stage), num_trained, num_ranks)["zero_optimization"]
    sizes = {section.get("reduce_bucket_size"), section.get("allgather_bucket_size")}
    assert sizes == {size} and section.get("overlap_comm") == is_overlapped
    given = {"reduce_bucket_size": 7, "overlap_comm": False}
    own = build_config(zero_stage=stage, overrides={"zero_optimization": given})
    assert given.items() <= with_buckets(own, num_trained, num_ranks)["zero_optimization"].items()


# ---- on a GPU


@pytest.mark.parametrize(("stage", "dtype", "offload"), SETUPS)
def test_a_small_model_trains_in_little_memory(stage, dtype, offload):
    """A bucket of DeepSpeed's own size takes 2 GiB in fp32."""
    with pretended_gpu(memory_gib=0.01):
        trained = Trained(stage, dtype, offload)
        take_steps([trained.gradients(1.0)])


@pytest.mark.parametrize(("stage", "dtype", "offload"), [s for s in SETUPS if s[2] != "none"])
def test_what_is_offloaded_is_copied_from_pinned_memory(stage, dtype, offload):
    """Copies from other memory wait, whatever DeepSpeed asks for."""
    num_waits = []
    for is_pinned in (None, False):
        own = {} if is_pinned is None else {"pin_memory": is_pinned, "device": "cpu"}
        names = ("offload_optimizer", "offload_param") if offload == "all" else ("offload_optimizer",)
        overrides = {"zero_optimization": {name: own for name in names if own}}
        with pretended_gpu() as gpu:
            trained = Trained(stage, dtype, offload, overrides=overrides)
            take_steps([trained.gradients(1.0)])
            gpu.clear()
            take_steps([trained.gradients(1.0)])
            num_waits.append(sum(wait.name.startswith("copy") for wait in gpu.waits))
    assert num_waits[0] <= 0.6 * num_waits[1], num_waits


@pytest.mark.parametrize(
    ("on_gpu", "offload", "given", "num_threads"),
    [
        (True, "optimizer", {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun
        (True, "optimizer", {"LOCAL_SIZE": "2"}, 8),  # DeepSpeed's launcher
        (True, "optimizer", {"LOCAL_WORLD_SIZE": "64"}, 1),
        (True, "optimizer", {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "4"}, None),
        (True, "none", {"OMP_NUM_THREADS": "1"}, None),
        (False, "optimizer", {"OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_an_offloaded_optimizer_has_its_ranks_share_of_the_cores(
    on_gpu, offload, given, num_threads, monkeypatch
):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    with pretended_gpu() if on_gpu else nullcontext():
        Trained(1, "fp32", offload)
    assert found == ([num_threads] if num_threads else [])


def test_the_next_matrix_of_a_7b_model_is_fetched_while_one_is_used():
    """DeepSpeed's own arithmetic, every number of elements scaled down alike."""
    real, size = 11008 * 4096, 64 * 64
    settings = DeepSpeedZeroConfig(**zero_section(zero_stage=3))
    names = ("max_live_parameters", "prefetch_bucket_size", "max_reuse_distance")
    scaled = {f"stage3_{name}": getattr(settings, name) * size // real for name in names}
    overrides = {"zero_optimization": scaled | {"stage3_param_persistence_threshold": 0}}
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(30)))
    engine = build_engine(model, build_config(zero_stage=3, overrides=overrides), SFTArguments(), 10)
    is_there = []
    for number in (3, 12):
        here, following = model[number], model[number + 1].weight
        here.register_forward_hook(
            lambda *_, following=following: is_there.append(
                following.ds_status != ZeroParamStatus.NOT_AVAILABLE
            )
        )
    for _ in range(3):  # DeepSpeed learns the order first
        is_there.clear()
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()
    assert all(is_there) and is_there


def test_overrides_win_key_by_key_and_change_nothing_else():
    base = build_config(zero_stage=3)
    overrides = {"zero_optimization": {"stage3_prefetch_bucket_size": 7}, "zero_new": 1}
    config = build_config(zero_stage=3, overrides=overrides)
    assert config["zero_optimization"] == base["zero_optimization"] | {"stage3_prefetch_bucket_size": 7}
    assert config.keys() - base.keys() == {"zero_new"}
    assert merge({"a": {"b": 1}}, {"a": 2}) == {"a": 2}
