"""The hybrid engine's flags: what is refused, and what reaches the engine."""

import pytest
import torch
from planned_runs import OPT_1B, OPT_350M, ppo
from tiny_configs import tiny_config

from common.engine.ds_config import load_overrides
from common.flags.args import Problems, parse_args
from common.ranks import distributed
from step3_ppo import checks
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_roles import build_role_specs, build_roles
from step3_ppo.rewards.reward_specs import RewardSpec
from tools.memory_plan import MemoryPlan

REQUIRED = "--data_path x --actor_model_name_or_path a --critic_model_name_or_path c"


def parse(words: str) -> PPOArguments:
    return parse_args(PPOArguments, f"{REQUIRED} {words}".split(), description="", problems=Problems())


@pytest.fixture
def problems_of(monkeypatch):
    """Return what is wrong with words of the command line for a tiny llama."""

    def check(words: str, num_ranks: int = 4) -> list[str]:
        monkeypatch.setattr(checks.distributed, "world_size", lambda: num_ranks)
        found = Problems()
        args = parse(words)
        checks.check_flags(args, num_ranks, distributed.dtype_name(args.dtype), found)
        checks.check_tensor_parallel(args, tiny_config("llama", 320), found)
        return found.messages

    return check


ENABLED = "--enable_hybrid_engine "


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (ENABLED + "--inference_tp_size 3", ["--inference_tp_size 3", "number of ranks, 4", "use 1, 2, 4"]),
        ("--inference_tp_size 2", ["needs --enable_hybrid_engine"]),
        (
            "--max_tokens_per_micro_batch 600 --max_tokens_per_scoring_pass 511",
            ["--max_tokens_per_scoring_pass 511 is less than the longest sequence", "to at least 512"],
        ),
        (
            "--per_device_generation_batch_size 12 --per_device_training_batch_size 8",
            ["--num_samples_per_prompt 1 = 12 samples per rank must be a multiple of", "_steps 1 = 8"],
        ),
        (
            "--per_device_generation_batch_size 12 --per_device_training_batch_size 18",
            ["--num_samples_per_prompt 1 = 12 samples per rank must be a multiple of", "_steps 1 = 18"],
        ),
        ("--old_logprobs strict --rollout_staleness 1", ["--old_logprobs strict", "use --old_logprobs auto"]),
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


@pytest.mark.parametrize(
    "words",
    [
        "--max_tokens_per_micro_batch 512",
        "--max_tokens_per_scoring_pass 512",
        "--per_device_generation_batch_size 16 --per_device_training_batch_size 8",
        ENABLED + "--inference_tp_size 4",
    ],
)
def test_what_just_fits_is_taken(words, problems_of):
    assert problems_of(words) == []


def test_heads_that_do_not_divide_name_the_sizes_that_work(problems_of):
    (message,) = problems_of(ENABLED + "--inference_tp_size 8", num_ranks=8)
    assert "--inference_tp_size 8" in message and "1, 2, 4" in message
    assert problems_of(ENABLED + "--inference_tp_size 2") == problems_of("") == []


def test_a_section_of_ds_config_is_refused_with_the_flags_in_its_place(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"hybrid_engine": {"enabled": true}, "zero_optimization": {}}')
    with pytest.raises(
        ValueError, match="section hybrid_engine is not used; .* use --enable_hybrid_engine, --infer"
    ):
        load_overrides(parse(f"--ds_config {path}"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--offload optimizer", [True, True]),
        ("--offload optimizer --critic_offload none", [True, False]),
        ("--critic_offload", [False, True]),
    ],
)
def test_actor_and_critic_are_offloaded_one_by_one(words, expected):
    args = parse(f"{words} --actor_zero_stage 2 --critic_zero_stage 2")
    args.actor_model_name_or_path = args.critic_model_name_or_path = "model"
    specs = [spec for spec in build_role_specs(args, [], has_critic=True) if spec.is_trained]
    configs = [spec.ds_config(args, 1) for spec in specs]
    assert ["offload_optimizer" in config["zero_optimization"] for config in configs] == expected
    run = ppo(OPT_1B, OPT_350M, *words.split(), "--actor_zero_stage", "2", "--critic_zero_stage", "2")
    assert [bool(role.zero.offload_optimizer) for role in run.roles if role.spec.is_trained] == expected


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("words", "has_left"),
    [("--critic_zero_stage 2", True), ("--critic_zero_stage 0", False), ("--critic_zero_stage 2", None)],
)
def test_the_critics_states_wait_on_the_cpu_while_the_actor_generates(
    words, has_left, tiny_model_folder, tiny_tokenizer
):
    """They leave where they can move; without the flag (None) they stay."""
    words += " --actor_zero_stage 2 --dtype fp32" + (
        "" if has_left is None else " --offload_states_for_generation"
    )
    folder = tiny_model_folder("llama")
    args = parse(f"{words} --actor_model_name_or_path {folder} --critic_model_name_or_path {folder}")
    reward = [RewardSpec("model", folder, 1.0, "reward")]
    built = build_roles(args, tiny_tokenizer, reward, 8, has_critic=True)
    optimizer = built.critic.model.optimizer
    states = (
        getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.param_groups[0]["params"]
    )
    before = [state.detach().clone() for state in states]
    homes = [state.data_ptr() for state in states]
    with built.actor.generation_mode():
        assert [state.data_ptr() != home for state, home in zip(states, homes, strict=True)] == [
            bool(has_left)
        ] * len(states)
    assert all(map(torch.equal, before, states))
    built.actor.model.destroy(), built.critic.model.destroy()

    plan = MemoryPlan(ppo(OPT_1B, OPT_350M, *words.split()))
    (moment,) = (moment for moment in plan.moments if moment.verb == "generate")
    assert (("critic", "optimizer") in moment.cpu) == (("critic", "optimizer") not in moment.gpu)
    assert (("critic", "optimizer") in moment.cpu) == bool(has_left)


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_offload_to_a_disk_is_refused_with_the_reason(name, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        f'{{"zero_optimization": {{"stage": 3, "{name}": {{"device": "nvme", "nvme_path": "x"}}}}}}'
    )
    with pytest.raises(ValueError, match=f'ds.json: {name} to the device nvme .* checkpoints .*use "cpu"'):
        load_overrides(parse(f"--ds_config {path}"))
