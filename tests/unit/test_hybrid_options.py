"""The hybrid engine's flags: what is refused, and what --ds_config says."""

import json
from types import SimpleNamespace

import pytest
from tiny_configs import tiny_config

from common.flags.args import Problems, parse_args
from step3_ppo import hybrid_options as options
from step3_ppo.arguments import PPOArguments
from step3_ppo.rollout import OldLogprobs

REQUIRED = "--data_path x --actor_model_name_or_path a --critic_model_name_or_path c".split()


def parse(*words: str) -> PPOArguments:
    return parse_args(PPOArguments, [*REQUIRED, *words], description="", problems=Problems())


def problems_of(*words: str, family: str = "llama", num_ranks: int = 4, monkeypatch) -> list[str]:
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    monkeypatch.setattr(options.distributed, "world_size", lambda: num_ranks)
    found = Problems()
    options.check_hybrid(parse(*words), tiny_config(family, 320), found)
    return found.messages


ENABLED = "--enable_hybrid_engine"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            (ENABLED, "--inference_tp_size", "3"),
            ("--inference_tp_size 3", "number of ranks, 4", "use 1, 2, 4"),
        ),
        (("--inference_tp_size", "2"), ("needs --enable_hybrid_engine",)),
        (
            (ENABLED, "--generation_slots", "9000000", "--per_device_generation_batch_size", "9000000"),
            ("--generation_slots 9000000", "GiB are free; use at most"),
        ),
        (
            (ENABLED, "--inference_tp_size", "2", "--unpin_actor_parameters", "--actor_zero_stage", "3"),
            ("exclude each other",),
        ),
        (("--offload_states_for_generation", "--dtype", "fp32"), ("needs --actor_zero_stage 1, 2 or 3",)),
        (
            ("--offload_states_for_generation", "--actor_zero_stage", "3", "--offload", "all"),
            ("--offload all exclude each other", "use --offload none or optimizer"),
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(words, parts, monkeypatch):
    messages = problems_of(*words, monkeypatch=monkeypatch)
    assert len(messages) == 1
    assert all(part in messages[0] for part in parts), messages


def test_heads_that_do_not_divide_name_the_sizes_that_work(monkeypatch):
    messages = problems_of(ENABLED, "--inference_tp_size", "8", num_ranks=8, monkeypatch=monkeypatch)
    assert len(messages) == 1 and "--inference_tp_size 8" in messages[0] and "1, 2, 4" in messages[0]


@pytest.mark.parametrize("words", [(), (ENABLED,), (ENABLED, "--inference_tp_size", "2")])
def test_what_works_passes(words, monkeypatch):
    assert problems_of(*words, monkeypatch=monkeypatch) == []


# A slot of 256 + 256 tokens: keys and values of 2 layers with 2 heads of 8 numbers.
SLOT_BYTES = 512 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("words", "num_slots", "slot_bytes"),
    [
        ((), 16, SLOT_BYTES),
        (("--dtype", "bf16"), 16, SLOT_BYTES // 2),
        (("--generation_slots", "5"), 5, SLOT_BYTES),
        (("--per_device_generation_batch_size", "200"), options.DEFAULT_SLOTS, SLOT_BYTES),
        (("--num_samples_per_prompt", "3"), 48, SLOT_BYTES),
        # The prompts of both ranks of a replica, and a head of the two.
        (("--inference_tp_size", "2"), 32, SLOT_BYTES // 2),
        (("--inference_tp_size", "2", "--num_samples_per_prompt", "2"), 64, SLOT_BYTES // 2),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else None,
)
def test_keys_and_values_must_fit_into_what_is_free(words, num_slots, slot_bytes, on_gpu, monkeypatch):
    """Two ranks share the memory of a machine; a GPU is a rank's own."""

    def found(free_bytes: int) -> list[str]:
        monkeypatch.setattr(options.distributed, "has_gpu", lambda: on_gpu)
        monkeypatch.setattr(options.distributed, "local_world_size", lambda: 2)
        memory = SimpleNamespace(available=2 * free_bytes)
        monkeypatch.setattr(options.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(options.torch.cuda, "mem_get_info", lambda: (free_bytes, 10 * free_bytes))
        return problems_of(ENABLED, "--dtype", "fp32", *words, monkeypatch=monkeypatch)

    needed = num_slots * slot_bytes
    assert found(needed) == []
    (message,) = found(needed - 1)
    most = (needed - 1) // (2 * slot_bytes)
    assert f"--generation_slots {num_slots} of 512 tokens" in message and f"use at most {most}," in message


def test_the_section_of_ds_config_sets_flags(tmp_path):
    path = tmp_path / "ds.json"
    section = {"enabled": True, "inference_tp_size": 2, "pin_parameters": False, "max_out_tokens": 700}
    path.write_text(json.dumps({"hybrid_engine": section, "zero_optimization": {}}))
    args, problems = parse("--ds_config", str(path)), Problems()
    options.take_hybrid_section(args, problems)
    assert problems.messages == []
    made = options.hybrid_options(args)
    assert (made.enabled, made.inference_tp_size, made.gather_by_layer) == (True, 2, True)
    assert made.max_out_tokens == 512, "the key is DeepSpeed's: a slot has room for what the lengths need"

    args, problems = parse("--ds_config", str(path), "--inference_tp_size", "4"), Problems()
    options.take_hybrid_section(args, problems)
    assert len(problems.messages) == 1 and "--inference_tp_size 4" in problems.messages[0]

    for wrong, told in (
        ({"enable": True}, "no key 'enable'"),
        ({"inference_tp_size": 0}, "hybrid_engine.inference_tp_size 0 must be a whole number at least 1"),
        ({"enabled": "yes"}, "hybrid_engine.enabled 'yes' must be true or false"),
    ):
        path.write_text(json.dumps({"hybrid_engine": wrong}))
        args, problems = parse("--ds_config", str(path)), Problems()
        options.take_hybrid_section(args, problems)
        assert len(problems.messages) == 1 and told in problems.messages[0]


def test_a_slot_has_room_for_prompt_and_answer_by_default():
    assert options.hybrid_options(parse("--max_prompt_seq_len", "30")).max_out_tokens == 286


def test_the_sampler_is_trusted_as_long_as_it_agrees():
    auto = OldLogprobs("auto")
    assert auto.recomputes and auto.judge(1e-7) is None and not auto.recomputes
    assert auto.judge(1e-4) is None and not auto.recomputes
    assert "recomputed from here on" in auto.judge(0.01) and auto.recomputes
    assert auto.judge(0.01) is None and auto.recomputes
    rollout = OldLogprobs("rollout")
    assert not rollout.recomputes and "--old_logprobs recompute" in rollout.judge(0.01)
    assert not rollout.recomputes
    recompute = OldLogprobs("recompute")
    assert recompute.recomputes and recompute.judge(1e-9) is None and recompute.recomputes
