"""docs/migration.md has every flag of DeepSpeed-Chat, and each means what the page says it means."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import tiny_config
from transformers import AutoModel

import train
from chat import ChatArguments
from common.flags.args import Problems, parse_args
from common.flags.flag_values import no_effect_notes
from common.flags.other_names import IGNORED, OLDER_NAMES, SWITCHES
from common.models.loading import ModelOptions
from common.models.value_model import has_saved_head, load_value_model
from serving.prompt_eval import PromptEvalArguments
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments, RewardEvalArguments
from step3_ppo.arguments import PPOArguments

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/migration.md").read_text()
OURS = {
    "SFT": SFTArguments,
    "RM": RewardArguments,
    "DPO": RewardArguments,
    "PPO": PPOArguments,
    "prompt_eval": PromptEvalArguments,
    "rw_eval": RewardEvalArguments,
    "chat": ChatArguments,
    "train": train.TrainArguments,
}
REQUIRED, OFF = "REQUIRED", False
TEMPORARY = "(temporary folder)"
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
# Of DeepSpeed-Chat: flags by program ("STEPS" are SFT, RM, DPO, PPO), with their default there.
STEPS, SINGLE = "SFT RM DPO PPO", "SFT RM DPO"
THEIRS: dict[str, list[tuple[str, Any]]] = {
    "data_path": [(STEPS, ["Dahoas/rm-static"])],
    "data_split": [(STEPS, "2,4,4")],
    "sft_only_data_path": [("SFT", [])],
    "data_output_path": [(STEPS, TEMPORARY)],
    "max_seq_len": [(SINGLE, 512)],
    "unsupervised_dataset_name": [("PPO", None)],
    "unsupervised_dataset_config_name": [("PPO", None)],
    "unsup_coef": [("PPO", 27.8)],
    "max_prompt_seq_len": [("PPO", 256)],
    "max_answer_seq_len": [("PPO", 256)],
    "preprocessing_num_workers": [("PPO", None)],
    "model_name_or_path": [(f"{SINGLE} rw_eval", REQUIRED)],
    "dropout": [(SINGLE, None)],
    "disable_dropout": [("SFT RM", OFF)],
    "tensorboard_path": [
        ("SFT", "step1_tensorboard"),
        ("RM DPO", "step2_tensorboard"),
        ("PPO", "step3_tensorboard"),
    ],
    "add_eot_token": [(f"{STEPS} prompt_eval rw_eval", OFF)],
    "eot_token": [("SFT", "<|endoftext|>")],
    "num_padding_at_beginning": [("RM PPO rw_eval", 1)],
    "actor_model_name_or_path": [("PPO", REQUIRED)],
    "critic_model_name_or_path": [("PPO", REQUIRED)],
    "actor_dropout": [("PPO", None)],
    "critic_dropout": [("PPO", None)],
    "disable_actor_dropout": [("PPO", OFF)],
    "disable_critic_dropout": [("PPO", OFF)],
    "model_name_or_path_baseline": [("prompt_eval", REQUIRED)],
    "model_name_or_path_finetune": [("prompt_eval", REQUIRED)],
    "actor-model": [("train", "1.3b")],
    "reward-model": [("train", "350m")],
    "path": [("chat", None)],
    "per_device_train_batch_size": [(f"{SINGLE} PPO", 16)],
    "per_device_mini_train_batch_size": [("PPO", 16)],
    "generation_batch_numbers": [("PPO", 1)],
    "per_device_eval_batch_size": [(SINGLE, 16)],
    "learning_rate": [("SFT DPO", 1e-3), ("RM", 5e-5)],
    "weight_decay": [(SINGLE, 0.0)],
    "num_train_epochs": [(STEPS, 1)],
    "gradient_accumulation_steps": [(STEPS, 1)],
    "lr_scheduler_type": [(STEPS, "cosine")],
    "num_warmup_steps": [(SINGLE, 0), ("PPO", 100)],
    "seed": [(SINGLE, 1234), ("PPO", None)],
    "lora_learning_rate": [(SINGLE, 5e-4)],
    "beta": [("DPO", 0.1)],
    "label_smoothing": [("DPO", 0.0)],
    "per_device_generation_batch_size": [("PPO", 16)],
    "per_device_training_batch_size": [("PPO", 16)],
    "generation_batches": [("PPO", 1)],
    "ppo_epochs": [("PPO", 1)],
    "actor_learning_rate": [("PPO", 9.65e-6)],
    "critic_learning_rate": [("PPO", 5e-6)],
    "actor_weight_decay": [("PPO", 0.0)],
    "critic_weight_decay": [("PPO", 0.0)],
    "actor_lora_learning_rate": [("PPO", 5e-4)],
    "critic_lora_learning_rate": [("PPO", 5e-4)],
    "lora_dim": [(SINGLE, 0)],
    "lora_module_name": [(SINGLE, "decoder.layers.")],
    "only_optimize_lora": [(STEPS, OFF)],
    "actor_lora_dim": [("PPO", 0)],
    "actor_lora_module_name": [("PPO", "decoder.layers.")],
    "critic_lora_dim": [("PPO", 0)],
    "critic_lora_module_name": [("PPO", "decoder.layers.")],
    "enable_mixed_precision_lora": [("PPO", OFF)],
    "gradient_checkpointing": [(SINGLE, OFF)],
    "offload": [(STEPS, OFF)],
    "dtype": [(STEPS, "fp16")],
    "zero_stage": [(SINGLE, 0)],
    "compute_fp32_loss": [(STEPS, OFF)],
    "offload_reference_model": [("DPO PPO", OFF)],
    "offload_reward_model": [("PPO", OFF)],
    "actor_zero_stage": [("PPO", 0)],
    "critic_zero_stage": [("PPO", 0)],
    "actor_gradient_checkpointing": [("PPO", OFF)],
    "critic_gradient_checkpointing": [("PPO", OFF)],
    "align_overflow": [("PPO", OFF)],
    "actor-zero-stage": [("train", "")],
    "reward-zero-stage": [("train", "")],
    "enable_hybrid_engine": [("PPO", OFF)],
    "unpin_actor_parameters": [("PPO", OFF)],
    "release_inference_cache": [("PPO", OFF)],
    "inference_tp_size": [("PPO", 1)],
    "tp_gather_partition_size": [("PPO", 8)],
    "output_dir": [(STEPS, None)],
    "local_rank": [(STEPS, -1)],
    "enable_tensorboard": [(STEPS, OFF)],
    "print_loss": [("SFT DPO", OFF)],
    "eval_interval": [("RM", 0)],
    "eval_iters": [("RM", 100)],
    "enable_ema": [("PPO", OFF)],
    "print_answers": [("PPO", OFF)],
    "print_answers_interval": [("PPO", 1)],
    "enable_test_mode": [("PPO", OFF)],
    "test_stop_step": [("PPO", 0)],
    "num_beams": [("prompt_eval", 1)],
    "num_beam_groups": [("prompt_eval", 1)],
    "top_k": [("prompt_eval", 4)],
    "penalty_alpha": [("prompt_eval", 0.6)],
    "num_return_sequences": [("prompt_eval", 1)],
    "max_new_tokens": [("prompt_eval", 100), ("chat", 128)],
    "language": [("prompt_eval", "English")],
    "step": [("train", [1, 2, 3])],
    "output-dir": [("train", "./output")],
    "deployment-type": [("train", "single_gpu")],
    "deepspeed": [(STEPS, OFF)],
    "deepspeed_config": [(STEPS, None)],
}
CHOICES = {
    "lr_scheduler_type": SCHEDULES,
    "dtype": ("fp16", "bf16"),
    "zero_stage": "0123",
    "actor_zero_stage": "0123",
    "critic_zero_stage": "0123",
    "actor-zero-stage": "0123",
    "reward-zero-stage": "0123",
    "actor-model": ("1.3b", "6.7b", "13b", "66b"),
    "reward-model": ("350m",),
    "language": ("English", "Chinese", "Japanese"),
    "deployment-type": ("single_gpu", "single_node", "multi_node"),
    "step": "123",
}
FACTS = [
    (flag, program, default)
    for flag, entries in THEIRS.items()
    for programs, default in entries
    for program in programs.split()
]
ROW = re.compile(r"^\| `--([\w-]+)` \| ([\w, ]+) \| (same|changed|no effect) \|(.*)\|$", re.MULTILINE)
STATUS = {
    (flag, program): (status, why.strip())
    for flag, programs, status, why in ROW.findall(PAGE)
    for program in programs.split(", ")
}


def field_of(flag: str, program: str) -> dataclasses.Field | None:
    """The field that a flag sets; None for one without effect."""
    fields = {field.name: field for field in dataclasses.fields(OURS[program])}
    name = flag.replace("-", "_")
    now = {older: now for now, older in OLDER_NAMES.items()} | {
        n: target for n, (target, _) in SWITCHES.items()
    }
    return fields.get(name) or (None if name in IGNORED else fields[now[name]])


def our_default(field: dataclasses.Field) -> Any:
    if field.metadata.get("required"):
        return REQUIRED
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def read(program: str, *words: str) -> tuple[Any, list[str]]:
    """The arguments, and what is wrong with them: flags that are required and not given are not."""
    problems = Problems()
    words = tuple(train._with_underscores(word) for word in words) if program == "train" else words
    args = parse_args(OURS[program], list(words), problems=problems)
    return args, [message for message in problems.messages if "is required: " not in message]


def test_the_page_has_every_flag_of_every_program_and_no_other():
    assert STATUS.keys() == {(flag, program) for flag, program, _ in FACTS}
    assert len(ROW.findall(PAGE)) == PAGE.split("\n## Every flag\n")[1].split("\n## ")[0].count("\n| `--"), (
        "a row has another form"
    )
    assert len(THEIRS) == 103 and len(FACTS) == 194


@pytest.mark.parametrize(("flag", "program", "default"), FACTS, ids=lambda value: str(value))
def test_a_flag_means_what_the_page_says_as_their_scripts_write_it(flag, program, default):
    field, (status, why) = field_of(flag, program), STATUS[flag, program]
    assert (status == "no effect") == (field is None)
    assert why or status == "same", "a change without a reason"
    if field is not None and flag not in SWITCHES:
        ours = our_default(field)
        is_same = ours == ("" if default is None and ours == "" else default)
        assert is_same or status != "same", f"the default is {ours!r}, theirs {default!r}"
    if default is OFF:
        words: list[list[str]] = [[]]
    elif flag in CHOICES:
        words = [[choice] for choice in CHOICES[flag]]
    else:
        known = [] if default is REQUIRED or default is None else default
        words = [[str(item) for item in known]] if isinstance(known, list) else [[str(known)]]
        is_text = field is not None and field.type in (str, list[str])
        words = words if words != [[]] else [["text" if is_text else "1"]]
    for values in words:
        args, problems = read(program, f"--{flag}", *values)
        assert problems == []
        notes = no_effect_notes(args, [f"--{flag}"])
        assert any("has no effect: " in note for note in notes) == (status == "no effect")
        if field is None or flag in SWITCHES:  # tests/unit/test_args.py has what switches do
            continue
        given = getattr(args, field.name)
        shown = [str(item) for item in given] if isinstance(given, list) else [str(given)]
        meant = {"offload": ["all"]}.get(flag, ["True"]) if default is OFF else values
        assert [s.removesuffix(".0") for s in shown] == [m.removesuffix(".0") for m in meant] or float(
            shown[0]
        ) == float(meant[0])


def test_a_flag_that_no_program_had_is_refused():
    for program in OURS:
        assert read(program, "--max_sequence")[1] != []


def test_what_differs_is_what_the_programs_do():
    """The table of differences names each flag's default as it is."""
    assert our_default(field_of("learning_rate", "SFT")) == 1e-5 and "| 1e-3 | 1e-5 |" in PAGE
    assert our_default(field_of("lora_module_name", "SFT")) == "auto"
    assert our_default(field_of("temperature", "PPO")) == 1.0 and our_default(field_of("top_k", "PPO")) == 0
    assert our_default(field_of("loss_on", "SFT")) == "response"
    assert our_default(field_of("loss", "RM")) == "end_score"


def test_an_old_reward_model_is_renamed_by_the_pages_own_lines(tmp_path, monkeypatch, tiny_tokenizer):
    monkeypatch.chdir(tmp_path)
    for family in ("opt", "llama"):
        torch.manual_seed(0)
        config = tiny_config(family, len(tiny_tokenizer))
        backbone, head = AutoModel.from_config(config), torch.randn(1, 32)
        backbone.resize_token_embeddings(328)  # to a multiple of 8
        backbone.config.save_pretrained(tmp_path / "deepspeed_chat_reward")
        tiny_tokenizer.save_pretrained(tmp_path / "deepspeed_chat_reward")
        theirs = {f"rwtransformer.{name}": weight for name, weight in backbone.state_dict().items()}
        torch.save(theirs | {"v_head.weight": head}, tmp_path / "deepspeed_chat_reward/pytorch_model.bin")
        code = PAGE.split("```python\n")[1].split("```")[0]
        exec(compile(code, "docs/migration.md", "exec"), {})
        assert has_saved_head("output/reward/export")
        value_model = load_value_model(ModelOptions("output/reward/export"), len(tiny_tokenizer))
        ids = torch.arange(1, 9)[None]
        hidden = backbone.eval()(input_ids=ids).last_hidden_state
        score = value_model.eval().classifier.score(
            value_model.classifier.base_model(input_ids=ids).last_hidden_state
        )
        torch.testing.assert_close(score, hidden @ head.T, rtol=1e-5, atol=1e-6)
