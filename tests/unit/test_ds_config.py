"""DeepSpeed configurations from options."""

import pytest

from common.engine.ds_config import EngineOptions, build_config, merge


def test_batch_sizes_multiply():
    options = EngineOptions(micro_batch_size=4, gradient_accumulation_steps=3, world_size=2)
    assert build_config(options)["train_batch_size"] == 4 * 3 * 2


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"),
    [(0, "fp32", 0), (0, "bf16", 1), (0, "fp16", 1), (3, "bf16", 3)],
)
def test_bf16_never_runs_without_fp32_master_weights(stage, dtype, expected):
    config = build_config(EngineOptions(zero_stage=stage, dtype=dtype))
    assert config["zero_optimization"]["stage"] == expected
    assert ("bf16" in config, "fp16" in config) == (dtype == "bf16", dtype == "fp16")


@pytest.mark.parametrize(
    ("offload", "stage", "expected"),
    [
        ("none", 3, set()),
        ("optimizer", 3, {"offload_optimizer"}),
        ("param", 3, {"offload_param"}),
        ("all", 2, {"offload_optimizer"}),
        ("all", 3, {"offload_optimizer", "offload_param"}),
    ],
)
def test_offload_moves_what_the_stage_can_move(offload, stage, expected):
    section = build_config(EngineOptions(zero_stage=stage, offload=offload))["zero_optimization"]
    assert {key for key in section if key.startswith("offload")} == expected


def test_stage_3_keeps_deepspeed_chats_thresholds():
    section = build_config(EngineOptions(zero_stage=3))["zero_optimization"]
    assert section["stage3_param_persistence_threshold"] == 1e4
    assert section["stage3_max_live_parameters"] == section["stage3_prefetch_bucket_size"] == 3e7


def test_a_frozen_model_has_no_optimizer_to_offload():
    section = build_config(EngineOptions(zero_stage=3, offload="all"), is_trained=False)["zero_optimization"]
    assert "offload_optimizer" not in section and "offload_param" in section


def test_overrides_win_key_by_key_and_change_nothing_else():
    base = build_config(EngineOptions(zero_stage=3))
    overrides = {"zero_optimization": {"stage3_max_live_parameters": 7}, "zero_new": 1}
    config = build_config(EngineOptions(zero_stage=3, overrides=overrides))
    assert config["zero_optimization"] == base["zero_optimization"] | {"stage3_max_live_parameters": 7}
    assert config.keys() - base.keys() == {"zero_new"}
    assert merge({"a": {"b": 1}}, {"a": 2}) == {"a": 2}
