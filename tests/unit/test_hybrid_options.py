"""The hybrid engine's flags: what is refused, and what reaches the engine."""

from types import SimpleNamespace

import pytest
from tiny_configs import tiny_config

from common.flags.args import Problems, parse_args
from step3_ppo import start_up
from step3_ppo.arguments import PPOArguments

REQUIRED = "--data_path x --actor_model_name_or_path a --critic_model_name_or_path c"


def parse(words: str) -> PPOArguments:
    return parse_args(PPOArguments, f"{REQUIRED} {words}".split(), description="", problems=Problems())


@pytest.fixture
def problems_of(monkeypatch):
    """Return what is wrong with words of the command line for a tiny llama."""

    def check(words: str, num_ranks: int = 4) -> list[str]:
        monkeypatch.setattr(start_up.distributed, "world_size", lambda: num_ranks)
        found = Problems()
        start_up.check_hybrid(parse(words), tiny_config("llama", 320), found)
        return found.messages

    return check


ENABLED = "--enable_hybrid_engine "


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (ENABLED + "--inference_tp_size 3", ["--inference_tp_size 3", "number of ranks, 4", "use 1, 2, 4"]),
        ("--inference_tp_size 2", ["needs --enable_hybrid_engine"]),
        (
            ENABLED + "--inference_tp_size 2 --unpin_actor_parameters --actor_zero_stage 3",
            ["exclude each other"],
        ),
        ("--offload_states_for_generation --dtype fp32", ["needs --actor_zero_stage 1, 2 or 3"]),
        (
            "--offload_states_for_generation --actor_zero_stage 3 --offload all",
            ["--offload all exclude each other", "use --offload none or optimizer"],
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(words, parts, problems_of):
    (message,) = problems_of(words)
    assert all(part in message for part in parts), message


def test_heads_that_do_not_divide_name_the_sizes_that_work(problems_of):
    (message,) = problems_of(ENABLED + "--inference_tp_size 8", num_ranks=8)
    assert "--inference_tp_size 8" in message and "1, 2, 4" in message
    assert problems_of(ENABLED + "--inference_tp_size 2") == problems_of("") == []


# A slot of 256 + 256 tokens: keys and values of 2 layers with 2 heads of 8 numbers.
SLOT_BYTES = 512 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("words", "num_slots", "slot_bytes", "on_gpu"),
    [
        ("--dtype fp32", 16, SLOT_BYTES, False),
        ("--dtype bf16 --generation_slots 5", 5, SLOT_BYTES // 2, True),
        ("--dtype fp32 --per_device_generation_batch_size 200", start_up.DEFAULT_SLOTS, SLOT_BYTES, True),
        # The prompts of both ranks of a replica, and a head of the two.
        ("--dtype fp32 --inference_tp_size 2 --num_samples_per_prompt 2", 64, SLOT_BYTES // 2, False),
    ],
)
def test_keys_and_values_must_fit_into_what_is_free(
    words, num_slots, slot_bytes, on_gpu, problems_of, monkeypatch
):
    """Two ranks share the memory of a machine; a GPU is a rank's own."""

    def problems(free_bytes: int) -> list[str]:
        monkeypatch.setattr(start_up.distributed, "has_gpu", lambda: on_gpu)
        monkeypatch.setattr(start_up.distributed, "local_world_size", lambda: 2)
        memory = SimpleNamespace(available=2 * free_bytes)
        monkeypatch.setattr(start_up.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(start_up.torch.cuda, "mem_get_info", lambda: (free_bytes, 10 * free_bytes))
        return problems_of(ENABLED + words)

    needed = num_slots * slot_bytes
    assert problems(needed) == []
    (message,) = problems(needed - 1)
    most = (needed - 1) // (2 * slot_bytes)
    assert f"--generation_slots {num_slots} of 512 tokens" in message and f"use at most {most}," in message


def test_a_section_of_ds_config_is_refused_with_the_flags_in_its_place(tmp_path, problems_of):
    path = tmp_path / "ds.json"
    path.write_text('{"hybrid_engine": {"enabled": true}, "zero_optimization": {}}')
    (message,) = problems_of(f"--ds_config {path}")
    assert "hybrid_engine" in message and "give --enable_hybrid_engine, --inference_tp_size" in message
    path.write_text('{"zero_optimization": {}}')
    assert problems_of(f"--ds_config {path}") == []
