"""Every flag that is to change a number changes one: runs that differ in it alone differ in what they leave.

A flag that is not handed on to where it acts gives the same losses, texts and weights, to the bit.
"""

import dataclasses
import hashlib
import json
from typing import Any

import pytest
from program_runs import read_metrics, run_here

from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo.arguments import PPOArguments

pytestmark = pytest.mark.slow

STEPS = {1: SFTArguments, 2: RewardArguments, 3: PPOArguments}
SHARED = {"data_split": "1,1,1", "dtype": "fp32", "max_train_steps": 2, "save_interval": 0}
SINGLE = {"max_seq_len": 48, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "eval_fraction": 0.2}
PPO = {
    "data_split": "0,0,1",
    "max_prompt_seq_len": 24,
    "max_answer_seq_len": 8,
    "per_device_generation_batch_size": 8,
    "per_device_training_batch_size": 4,
    "ppo_epochs": 2,
    "actor_learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "num_warmup_steps": 0,
    "enable_hybrid_engine": True,
}
# flag: the other value, or (the other value, the flags that both runs have beside it); or a list of these.
# A value {name} is a file or folder of `inputs`.
EVERYWHERE: dict[str, Any] = {
    "dtype": "bf16",
    "gradient_clipping": 0.01,
    "seed": 5,
    "ds_config": "{ds_config}",
    "lr_scheduler_type": "constant",
    "num_warmup_steps": 2,
    "optimizer": "muon",
    "muon_learning_rate": (0.1, {"optimizer": "muon"}),
    "optimizer_dtype": ("bf16", {"dtype": "bf16"}),
    "gradient_accumulation_steps": 2,
    "max_train_steps": 1,
    "num_train_epochs": (2, {"max_train_steps": 5, "data_path": "{few}"}),
    "data_path": "{ranked}",
    "data_split": "3,1,2",
    "data_weights": 0.5,
    "template": ["plain", "one_line"],
    "score_column": ("quality", {"data_path": "{scored}"}),
    "columns": ("prompt=response,response=prompt", {"data_path": "{scored}"}),
    "eot_token": "a",
    "add_eot_token": (True, {"eot_token": "<|eot|>"}),
}
OF_ONE_MODEL = EVERYWHERE | {
    "model_name_or_path": "{gpt2}",
    "chat_template_kwargs": ('{{"brief": "a"}}', {"model_name_or_path": "{chatty}"}),
    "max_seq_len": 16,
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": (1, {"eval_iters": 1, "eval_fraction": 0.5}),
    "eval_iters": (1, {"per_device_eval_batch_size": 1, "eval_fraction": 0.5}),
    "eval_interval": 1,
    "eval_fraction": 0.4,
    "group_by_length": True,
    "learning_rate": 2e-3,
    "weight_decay": 0.5,
    "dropout": 0.3,
    "lora_dim": 4,
    "lora_alpha": (1.0, {"lora_dim": 4}),
    "lora_module_name": ("q_proj", {"lora_dim": 4}),
    "lora_learning_rate": (1e-2, {"lora_dim": 4}),
    "only_optimize_lora": (False, {"lora_dim": 4, "only_optimize_lora": True}),
    "load_in_4bit": (True, {"lora_dim": 4}),  # it is refused without bitsandbytes
}
EVALUATED = {"eval_fraction": 0.3}
STALE = {"rollout_staleness": 1, "max_train_steps": 3}
RANDOM_SCORES = {"reward": "function:random_scores:score", "num_samples_per_prompt": 2}
FAILING = {"reward": "function:random_scores:fail"}
TALKS = "class Talk:\n    def reset(self, row):\n        return row['messages']\n\n"
TALKS += (
    "    def step(self, messages):\n        return messages[:1], len(messages[-1]['content']) % 2, False\n"
)
TAUGHT = {"algorithm": "distill", "teacher_model_name_or_path": "{gpt2}", "num_samples_per_prompt": 2}
ADAPTERS = {"actor_lora_dim": 4, "critic_lora_dim": 4}
ACTS: dict[int, dict[str, Any]] = {
    1: OF_ONE_MODEL | {"loss_on": "all", "sft_only_data_path": "{text}"},
    2: {  # and those of step 1, by the same code
        "loss": ["token_wise", "dpo", "ipo", "kto"],
        "reward_pooling": "mean",
        "use_margin": (True, {"data_path": "{margins}"}),
        "center_coef": 0.5,
        "beta": [(0.5, {"loss": loss}) for loss in ("dpo", "ipo", "kto")],
        "desirable_weight": (2.0, {"loss": "kto"}),
        "undesirable_weight": (2.0, {"loss": "kto"}),
        "label_smoothing": (0.2, {"loss": "dpo"}),
        "dropout": [0.3, (0.3, {"loss": "dpo"})],
        "max_pairs_per_prompt": (1, {"data_path": "{ranked}"}),
        "lora_dim": 4,
        "only_optimize_lora": (False, {"lora_dim": 4, "only_optimize_lora": True}),
    },
    3: EVERYWHERE
    | {
        "max_prompt_seq_len": 8,
        "max_answer_seq_len": 4,
        "unsupervised_dataset_name": "{text}",
        "unsup_coef": (1.0, {"unsupervised_dataset_name": "{text}"}),
        "unsup_step": ("own", {"unsupervised_dataset_name": "{text}"}),
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.5,
        "num_samples_per_prompt": 2,
        "actor_model_name_or_path": "{gpt2}",
        "chat_template_kwargs": ('{{"brief": "a"}}', {"actor_model_name_or_path": "{chatty}"}),
        "critic_model_name_or_path": "{reward2}",
        "only_optimize_lora": (False, ADAPTERS | {"only_optimize_lora": True}),
        "load_in_4bit": (True, ADAPTERS),
        "num_train_epochs": (2, {"max_train_steps": 4, "data_path": "{few}"}),
        "score_column": ("nothing", {"data_path": "{scored}"}),
        "per_device_generation_batch_size": 4,
        "generation_batches": 2,
        "per_device_training_batch_size": 8,
        "ppo_epochs": 1,
        "rollout_staleness": (1, {"max_train_steps": 3}),
        "dynamic_sampling_rounds": (1, RANDOM_SCORES),
        "reward": "function:random_scores:score",
        "environment": "talks:Talk",
        "reward_on_error": ("mask", FAILING | {"reward_on_error": "default"}),
        "reward_default_score": (1.0, FAILING | {"reward_on_error": "default"}),
        "reward_clip": 0.01,
        "whiten_scores": ["batch", ("group", {"num_samples_per_prompt": 2, "whiten_scores": "batch"})],
        "length_reward_tokens": 8,
        "overlong_buffer_tokens": 8,
        "truncated": ["bootstrap", "mask"],
        "truncated_score": [-3.0, (0.0, {"truncated": "bootstrap"})],
        "algorithm": [("grpo", {"num_samples_per_prompt": 2}), ("remax", {"algorithm": "reinforce++"})],
        "teacher_model_name_or_path": ("{base}", TAUGHT),
        "distill_loss": [(loss, TAUGHT) for loss in ("forward_kl", "jsd", "sampled")],
        "distill_weight": (0.5, TAUGHT),
        "distill_beta": (0.1, TAUGHT | {"distill_loss": "jsd"}),
        "kl_coef": 1.0,
        "kl_in": "loss",
        "kl_estimator": ["k2", ("k1", {"kl_in": "loss", "kl_coef": 1.0})],
        "kl_target": 0.01,
        "kl_horizon": (50, {"kl_target": 0.01}),
        "gamma": 0.5,
        "gae_lambda": 0.5,
        "adv_norm": ["none", ("group_mean_batch_std", {"num_samples_per_prompt": 2})],
        "ref_ema_decay": [0.5, (0.0, {"ref_ema_decay": 0.9})],
        "policy_loss": ["ppo:dual_clip=1.001", "gspo", "cispo"],
        "clip_range": [0.01, (0.01, {"policy_loss": "gspo"})],
        "clip_range_high": 0.01,
        "loss_aggregation": "sequence",
        "rollout_correction": [
            ("tis", STALE),
            ("seq_mis", STALE | {"correction_low": 0.9, "correction_high": 1.1}),
            ("geo_rs", STALE),
        ],
        "correction_low": (0.99, STALE | {"rollout_correction": "mis", "correction_high": 2}),
        "correction_high": [(1, STALE | {"rollout_correction": form}) for form in ("tis", "mis", "seq_tis")],
        "prox_logprobs": ("loglinear", STALE | {"rollout_correction": "tis"}),
        "early_stop_kl": 1e-9,
        "early_stop_action": ("skip", {"early_stop_kl": 1e-9}),
        "early_stop_imp_ratio": 1e-9,
        "value_norm_beta": (0.5, {"value_norm": "exp"}),
        "value_clip_range": 0.001,
        "value_loss": "huber",
        "value_norm": ["exp", ("ma", {"value_norm": "exp"})],
        "entropy_coef": 0.1,
        "old_logprobs": "recompute",
        "trusted_logprob_gap": 1e-12,
        "replay_sampling_support": (True, {"top_k": 3}),
        "enable_hybrid_engine": False,
        "eval_fraction": 0.3,
        "eval_data_path": "{ranked}",
        "eval_prompts": (2, EVALUATED),
        "eval_interval": [
            (1, EVALUATED),
            ("epoch", EVALUATED | {"num_train_epochs": 2, "max_train_steps": 3, "data_path": "{few}"}),
        ],
        "keep_best": ("eval/score", EVALUATED),
        "ema_decay": [0.992, (0.5, {"ema_decay": 0.992})],
        "lora_alpha": [(1.0, {"actor_lora_dim": 4}), (1.0, {"critic_lora_dim": 4})],
    }
    | {f"{role}_learning_rate": 2e-2 for role in ("actor", "critic")}
    | {f"{role}_weight_decay": 0.5 for role in ("actor", "critic")}
    | {f"{role}_lora_dim": 4 for role in ("actor", "critic")}
    | {f"{role}_lora_module_name": ("q_proj", {f"{role}_lora_dim": 4}) for role in ("actor", "critic")}
    | {f"{role}_lora_learning_rate": (1e-2, {f"{role}_lora_dim": 4}) for role in ("actor", "critic")},
}
# What moves no number that a run leaves, and why; what else it does is tested with its own file.
MOVES_NO_NUMBER = {
    "places": "output_dir data_output_path tensorboard_path local_rank plugins resume",
    "reports": "trackers log_interval print_answers_interval dry_run save_rollouts",
    "checkpoints": "save_interval save_total_limit",
    "limits, at which a run ends or a reward fails": "max_bad_rows max_bad_steps collective_timeout "
    "reward_timeout_seconds",
    "memory and time alone": "offload critic_offload zero_stage actor_zero_stage critic_zero_stage packed "
    "max_tokens_per_micro_batch max_tokens_per_scoring_pass gradient_checkpointing "
    "actor_gradient_checkpointing pad_vocab_multiple "
    "critic_gradient_checkpointing offload_reference_model offload_reward_model inference_tp_size "
    "inference_tp_groups "
    "offload_states_for_generation generation_slots tp_gather_partition_size "
    "no_share_prompts no_cuda_graphs unpin_actor_parameters release_inference_cache reward_processes "
    "reward_batch_size merge_adapters auto",
    "on a CPU, that is; test_on_a_pretended_gpu.py": "deterministic tf32",
    "rounding alone; test_exact_runs.py": "exact",
    "digests; test_replay.py": "digest_interval",
    "of hub names": "trust_remote_code unsupervised_dataset_config_name",
}
CASES = [
    pytest.param(step, flag, *(case if isinstance(case, tuple) else (case, {})), id=f"step{step}-{flag}-{n}")
    for step, flags in ACTS.items()
    for flag, cases in flags.items()
    for n, case in enumerate(cases if isinstance(cases, list) else [cases])
]


@pytest.mark.parametrize("step", STEPS)
def test_every_flag_is_in_a_table(step):
    fields = {field.name for field in dataclasses.fields(STEPS[step])}
    still = {name for names in MOVES_NO_NUMBER.values() for name in names.split()}
    acting = set(ACTS[step]) | (set(OF_ONE_MODEL) if step == 2 else set())
    assert fields - acting - still == set(), "neither seen to act nor known to move no number"
    assert set(ACTS[step]) - fields == set() and set(ACTS[step]) & still == set()


@pytest.fixture(scope="module")
def inputs(more_inputs, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("flags")
    (folder / "ds_config.json").write_text(json.dumps({"gradient_clipping": 0.01}))
    (folder / "random_scores.py").write_text(
        "def score(prompts, responses, rows):\n    return [float(len(r) % 2) for r in responses]\n"
        "def fail(prompts, responses, rows):\n    return [None if len(r) % 2 else 1.0 for r in responses]\n"
    )
    (folder / "talks.py").write_text(TALKS)
    return more_inputs | {"ds_config": str(folder / "ds_config.json"), "folder": str(folder)}


@pytest.fixture(scope="module")
def left_by(inputs, tmp_path_factory, lone_process, no_pictures) -> Any:
    """What a run of a step with these flags leaves: metrics without times, texts, and sums of its weights."""
    found: dict[str, Any] = {}  # a refused run leaves its exit code

    def run(step: int, flags: dict[str, Any], *, again: bool = False) -> Any:
        models = {"model_name_or_path": "{base}"}
        if step == 3:
            models = {"actor_model_name_or_path": "{base}", "critic_model_name_or_path": "{reward}"}
        flags = SHARED | {"data_path": "{rows}", "data_output_path": "{cache}"} | models | flags
        values = {k: v.format(**inputs) if isinstance(v, str) else v for k, v in flags.items()}
        key = f"{step} {json.dumps(values, sort_keys=True)}"
        if key not in found or again:
            output = tmp_path_factory.mktemp("run") / "output"
            try:
                run_here(step, values | {"output_dir": output})
            except SystemExit as refused:
                found[key] = refused.code
                return refused.code
            numbers = [
                {k: v for k, v in row.items() if "second" not in k and not k.startswith(("perf/", "hybrid/"))}
                for row in read_metrics(output)
            ]
            files = sorted(output.glob("*/*.safetensors"))
            sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
            found[key] = json.dumps(numbers), sums
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(inputs["folder"])
        yield run


@pytest.mark.parametrize("step", STEPS)
def test_two_runs_of_the_same_flags_are_alike(step, left_by):
    flags = PPO if step == 3 else SINGLE
    numbers, _ = left_by(step, flags)
    assert left_by(step, flags, again=True)[0] == numbers
    if step == 3:  # responses of one length would hide what lengths decide
        assert 0 < json.loads(numbers)[0]["rollout/finished_fraction"] < 1


@pytest.mark.parametrize(("step", "flag", "value", "beside"), CASES)
def test_a_flag_acts(step, flag, value, beside, left_by, capsys):
    flags = (PPO if step == 3 else SINGLE) | beside
    assert left_by(step, flags | {flag: value}) != left_by(step, flags)


@pytest.mark.parametrize("loss", ["end_score", "dpo"])
def test_pairs_are_learned_without_dropout_whatever_the_model_says(loss, left_by):
    """GPT-2's configuration has a dropout of 0.1."""
    flags = SINGLE | {"model_name_or_path": "{gpt2}", "loss": loss}
    assert left_by(2, flags) == left_by(2, flags | {"dropout": 0.0})
