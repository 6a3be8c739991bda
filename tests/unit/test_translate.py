"""tools.translate: the tables of others' flags, and the commands that they give."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaPreTrainedModel

from common.data.adapters.row_columns import Row
from common.models.loading import ModelOptions
from common.models.value_model import has_saved_head, load_value_model
from tools.translate import PROGRAMS, STEPS, TABLES, main, read_rules

ROOT = Path(__file__).resolve().parents[2]
# Sections "[program | library version]" of the flags of others: NAME=DEFAULT, of an old version NAME alone.
SECTIONS: dict[str, dict[str, str]] = {}
for line in (ROOT / "tests/unit/other_trainers_flags.txt").read_text().splitlines()[1:]:
    if line.startswith("["):
        section = SECTIONS.setdefault(line[1:-1], {})
    else:
        section |= {name: default for name, _, default in (word.partition("=") for word in line.split())}
VERSIONS = {
    "transformers": "5.23.0",
    "trl": "1.16.0",
    "trl ppo": "1.12.0",
    "openrlhf": "0.11.2",
    "llamafactory": "0.9.5",
}
# Flags of earlier versions and of the parser itself, which no section has.
OLDER = {
    "warmup_ratio", "evaluation_strategy", "group_by_length", "overwrite_output_dir", "save_safetensors",
    "logging_dir",
    "include_tokens_per_second", "no_cuda", "no_gradient_checkpointing", "no_average_tokens_across_devices",
    "no_disable_dropout", "torch_dtype", "config", "bf16", "prompt_max_len", "actor_init_on_gpu",
    "perf", "ptx_coef", "exp_name", "stage", "use_kl_estimator_k3",
}  # fmt: skip
LAUNCHER = TABLES["launcher"]["values"].keys() | set().union(*TABLES["launcher"]["not needed"].values())


def flags_of(program: str) -> dict[str, str]:
    """Flags of a program of theirs, with their defaults."""
    family, _, name = program.partition(" ")
    heads = {"trl": ("trainer", "trl", program), "openrlhf": (program,)}
    parts = heads.get(family, ("trainer", "seq2seq", "llamafactory"))
    flags: dict[str, str] = {}
    for head, section in SECTIONS.items():
        if head.split(" | ")[0] in parts and "0.10.0" not in head:
            flags |= section
    return flags


def translated(capsys, *words: str) -> tuple[str, list[str], str]:
    """Our command for theirs as one line, the remarks, and what stderr says; the command is in the output."""
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 2
    out, err = capsys.readouterr()
    command, *_ = out.split("\n# ")
    return " ".join(shlex.split(command.replace("\\\n", " "))), re.findall(r"^# (.*)$", out, re.M), err


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_of_theirs_is_known_and_only_flags_of_theirs(program):
    rules, products = read_rules(program)
    known = rules.keys() | set(" ".join(products.values()).split())
    assert flags_of(program).keys() - known == set()
    others = [flags_of(other).keys() for other in PROGRAMS if other.split()[0] == program.split()[0]]
    made = {name for name in rules if name.startswith("set.")}
    assert rules.keys() - LAUNCHER - OLDER - made - set().union(*others) == set()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_defaults_that_a_command_sets_are_theirs(program):
    theirs = flags_of(program)
    for name, value in PROGRAMS[program]["defaults"].items():
        text = json.dumps(value, separators=(",", ":")).replace('""', "null")
        assert text == theirs[name] or float(text) == float(theirs[name]), name


def test_the_versions_of_the_tables():
    files = (ROOT / "tools/their_flags").glob("*.yaml")
    noted = {n: v for file in files for n, v in yaml.safe_load(file.read_text())["versions"].items()}
    assert noted == VERSIONS | {"openrlhf until": "0.10.0"}
    read = {head.split(" | ")[1] for head in SECTIONS}
    assert read == {f"{name.split()[0]} {version}" for name, version in noted.items()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rule_names_flags_of_ours(program):
    rules, products = read_rules(program)
    words = " ".join(w.partition("# ")[0] for cases in rules.values() for w in cases.values())
    named = {*re.findall(r"--(\w+)", f"{words} {PROGRAMS[program]['always']}"), *products}
    assert named <= STEPS[int(PROGRAMS[program]["ours"][4])].__dataclass_fields__.keys()


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name.startswith("openrlhf")])
def test_a_name_of_openrlhf_until_0_10_is_a_present_one(program):
    rules, products = read_rules(program)
    known = rules.keys() | set(" ".join(products.values()).split())
    older = PROGRAMS[program]["older"]
    assert {n for n in SECTIONS[f"{program} | openrlhf 0.10.0"] if older.get(n, n) not in known} == set()


LLAMAFACTORY = {  # examples/train_lora of LLaMA-Factory, with a set of each format
    "stage": "sft", "do_train": True, "model_name_or_path": "M", "dataset": "alpaca, own",
    "template": "llama3",
    "cutoff_len": 100, "output_dir": "out", "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1,
    "bf16": True,
    "lora_target": "q_proj,v_proj", "plot_loss": True, "deepspeed": "examples/deepspeed/ds_z3_config.json",
}  # fmt: skip
SETS = {
    "alpaca": {"file_name": "alpaca.json"},
    "own": {"file_name": "own.json", "columns": {"prompt": "task", "query": "more", "response": "output"}},
    "turns": {"file_name": "turns.json", "formatting": "sharegpt", "tags": {"role_tag": "speaker"}},
    "pairs": {"hf_hub_url": "a/b", "ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen"}},
}


@pytest.fixture
def sets(tmp_path, monkeypatch) -> Path:
    """A working folder with data/dataset_info.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(SETS))
    return tmp_path


def test_a_yaml_of_llamafactory(sets, capsys):
    (sets / "a.yaml").write_text(yaml.safe_dump(LLAMAFACTORY | {"dataset": "own"}))
    command, remarks, err = translated(capsys, "a.yaml")
    assert command == (
        "python step1_sft/main.py --output_dir out --model_name_or_path M --data_path data/own.json "
        "--columns prompt=task,input=more --data_split 1,0,0 --lora_alpha 16 --zero_stage 3 "
        "--per_device_train_batch_size 1 --learning_rate 0.0001 --gradient_accumulation_steps 8 "
        "--num_train_epochs 3 --lr_scheduler_type cosine --dtype bf16 --lora_dim 8 "
        "--lora_module_name q_proj|v_proj --max_seq_len 100 --eval_fraction 0 --template chat"
    )
    assert "set by hand: --num_warmup_steps = 0.1 * max_steps" in remarks and err == ""
    assert "--plot_loss true: not needed: report.html has the curves" in remarks


def test_a_yaml_of_trl(sets, capsys):
    (sets / "sft.yaml").write_text(
        "model_name_or_path: M\ndataset_name: D\nuse_peft: true\nlora_target_modules: [q, v]\n"
    )
    command, remarks, err = translated(capsys, "trl", "sft", "--config", "sft.yaml", "--lora_r", "4")
    assert command.startswith("python step1_sft/main.py") and "--lora_dim 4 " in command and err == ""
    assert "--lora_module_name q|v" in command and "PEFT's choice" in " ".join(remarks)
    (sets / "ppo.yaml").write_text("sft_model_path: S\nreward_model_path: R\ndataset_name: D\n")
    assert translated(capsys, "ppo.yaml")[0].startswith("python step3_ppo/main.py")  # no other program fits
    assert "set by hand: --num_gpus" in str(
        translated(capsys, "torchrun --nnodes 2 --nproc_per_node 4 ppo.py")[1]
    )


def test_sets_whose_columns_or_turns_are_not_read_are_named(sets, capsys):
    (sets / "a.yaml").write_text(yaml.safe_dump(LLAMAFACTORY | {"dataset": "turns"}))
    assert "--set.role_tag speaker: expected (from|role)" in translated(capsys, "a.yaml")[2]
    assert "dataset none is not in data" in translated(capsys, "a.yaml", "dataset=none")[2]
    command, _, err = translated(capsys, "llamafactory-cli", "train", "a.yaml", "stage=dpo", "dataset=pairs")
    assert "--data_path a/b " in command and "--loss dpo" in command and err == ""
    (sets / "data/dataset_info.json").unlink()
    assert any("dataset_info.json: set by hand" in line for line in translated(capsys, "a.yaml")[1])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "accelerate launch --num_processes 2 --config_file zero3.yaml examples/scripts/ppo/ppo.py "
            "--dataset_name D "
            "--sft_model_path S --reward_model_path R --per_device_train_batch_size 4 "
            "--gradient_accumulation_steps 6 "
            "--num_mini_batches 3 --total_episodes 100 --missing_eos_penalty 1.0 --output_dir out",
            "deepspeed --num_gpus 2 step3_ppo/main.py, --per_device_generation_batch_size 24, "
            "--max_train_steps 3, "
            "--per_device_training_batch_size 4, --gradient_accumulation_steps 2, --actor_zero_stage 3, "
            "--ppo_epochs 4, "
            "--kl_coef 0.05, --reward_clip 0, --num_warmup_steps 0, --temperature 0.7, "
            "--critic_learning_rate 3e-06",
        ),
        (
            "trl sft --model_name_or_path M --dataset_name D --dataset_config c --use_peft --lora_r 8 "
            "--packing "
            "--no_gradient_checkpointing --report_to wandb mlflow --max_steps 50 --warmup_ratio 0.1",
            "--data_path D:c, --lora_dim 8, --lora_alpha 32, --lora_learning_rate 2e-05, --packed, "
            "--num_warmup_steps 5, "
            "--gradient_checkpointing false, --trackers wandb mlflow, --max_seq_len 1024, --eval_fraction 0",
        ),
        ("trl kto --model_name_or_path M --dataset_name D --bf16 false", "--loss kto, --dtype fp32"),
        (
            "trl grpo --model_name_or_path M --dataset_name D --reward_funcs mine.score --loss_type dr_grpo",
            "--algorithm grpo, --reward function:mine:score, --loss_aggregation constant, --kl_coef 0.0, "
            "--num_samples_per_prompt 8, --per_device_generation_batch_size 1, --adv_norm group",
        ),
        (
            "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path M --data.dataset D,E "
            "--data.input_key q --data.output_key a --train.batch_size 64",
            "--data_path D E, --columns prompt=q,response=a, --gradient_accumulation_steps 8, "
            "--zero_stage 2, "
            "--num_train_epochs 2, --template plain",
        ),
        (
            "ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray "
            "--pretrain M "
            "--reward_pretrain R --prompt_data D --actor_num_gpus_per_node 4 --generate_max_len 512 "
            "--save_path out "
            "--eps_clip_low_high 0.2 0.3 --use_wandb KEY --stop_properly_penalty_coef -1",
            "deepspeed --num_gpus 4, --critic_model_name_or_path R, --reward model:R, --clip_range 0.2, "
            "--clip_range_high 0.3, --per_device_generation_batch_size 256, "
            "--gradient_accumulation_steps 32, "
            "--max_prompt_seq_len 1024, --max_answer_seq_len 512, --truncated_score -1, --trackers "
            "wandb, --reward_clip 10",
        ),
    ],
    ids=lambda text: text[:30],
)
def test_a_command(words, parts, capsys):
    command, _, err = translated(capsys, words)
    assert err == ""
    assert [part for part in parts.split(", ") if f"{part} " not in f"{command} "] == []
    assert "KEY" not in command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "trl sft --model_name_or_path M --dataset_name D --lerning_rate 1",
            "--lerning_rate; did you mean --learning_rate",
        ),
        ("trl sft --model_name_or_path M --dataset_name D --steps 1", "unknown flag --steps"),
        (
            "trl sft --model_name_or_path M --dataset_name D --num_train_epochs 0.5",
            "--num_train_epochs 0.5: expected",
        ),
        ("trl dpo --model_name_or_path M --dataset_name D --save_strategy 7", ""),
        ("trl vllm-serve --model M", "trl vllm"),
        (
            "python ppo.py --sft_model_path S --reward_model_path R --num_mini_batches 3",
            "make it a whole number",
        ),
        ("trl sft --config none.yaml", "none.yaml is not a readable file"),
        ("torchrun finetune.py --lr 1", "has no counterpart"),
    ],
)
def test_what_is_not_understood_is_named(words, message, capsys):
    assert message in translated(capsys, words)[2]


def test_secrets_are_not_printed(capsys):
    _, remarks, _ = translated(capsys, "trl sft --model_name_or_path M --dataset_name D --hub_token SECRET")
    assert any("--hub_token: no counterpart" in line for line in remarks) and "SECRET" not in str(remarks)


def test_an_input_that_columns_names_follows_any_prompt():
    row = Row({"task": "How warm?", "more": "Here."}, {"prompt": "task", "input": "more"})
    assert row.prompt()[0].content == "How warm?\n\nHere."


FAMILIES = ("trl", "openrlhf", "llamafactory")
UNLISTED = {"evaluation_strategy", "use_kl_estimator_k3", "overwrite_output_dir"} | TABLES["launcher"][
    "values"
].keys()


def page_of(family: str) -> str:
    return (ROOT / f"docs/from_{family}.md").read_text()


def renamed_flags(family: str) -> dict[str, set[str]]:
    """Ours by their flag, without the prefix of a role, where the names differ by more than a group."""
    pairs: dict[str, set[str]] = {}
    for program in (name for name in PROGRAMS if name.startswith(family)):
        rules, products = read_rules(program)
        templates = {
            name: " ".join(text.partition("# ")[0] for text in cases.values())
            for name, cases in rules.items()
        }
        for flag, formula in products.items():
            templates[formula.split()[0]] = f"{templates.get(formula.split()[0], '')} --{flag}"
        for name, words in templates.items():
            ours = {re.sub("^(actor|critic)_(?!model)", "", flag) for flag in re.findall(r"--(\w+)", words)}
            ours -= {name, name.rpartition(".")[2], name.replace(".", "_")}
            if ours and name not in UNLISTED and not name.startswith(("set.", "no_", "2")):
                pairs.setdefault(name, set()).update(ours)
    return pairs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_has_the_flags_of_the_tables(family):
    page = page_of(family)
    shown: dict[str, set[str]] = {}
    for line in page.split("## Flags")[1].split("## ")[0].splitlines():
        cells = [re.findall("`([^`]+)`", cell) for cell in line.split("|")[1:-1]]
        shown |= {names[0]: set(ours) for names, ours in zip(cells[::2], cells[1::2], strict=True) if names}
    assert shown == renamed_flags(family)
    assert page.count("\n") <= 90, "more than two screens"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_example_of_a_page_is_what_the_tool_prints(family, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    language, theirs, ours = re.findall(
        r"```(sh|yaml)\n(.*?)```\n\n```bash\n(.*?)```", page_of(family), re.DOTALL
    )[0]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{"alpaca": {"file_name": "alpaca.json"}}')
    (tmp_path / "ppo.yaml").write_text(theirs)
    words = ["ppo.yaml"] if language == "yaml" else shlex.split(theirs.replace("\\\n", " "))
    command, _, err = translated(capsys, *words)
    assert command == " ".join(shlex.split(ours.replace("\\\n", " "))) and err == ""


def scores_of_the_converted_model(page: str, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Run the lines of a page, and score with the model that they save."""
    exec(compile(page.split("```python\n")[1].split("```")[0], "page", "exec"), {})
    assert has_saved_head("output/reward")
    classifier = load_value_model(ModelOptions("output/reward"), vocabulary).eval().classifier
    return classifier.score(classifier.base_model(input_ids=ids).last_hidden_state)


def test_reward_models_of_openrlhf_and_llamafactory_are_converted(
    tiny_model_folder, tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    base, ids = tiny_model_folder("llama"), torch.arange(1, 9)[None]
    AutoModelForCausalLM.from_pretrained(base).save_pretrained("base_model")
    AutoTokenizer.from_pretrained(base).save_pretrained("base_model")
    torch.manual_seed(0)

    class RewardModel(LlamaPreTrainedModel):  # OpenRLHF's: the family's base model and a head named score
        def __init__(self, config):
            super().__init__(config)
            self.model = AutoModel.from_config(config)
            self.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
            self.post_init()

    theirs = RewardModel(AutoModel.from_pretrained(base).config).eval()
    theirs.save_pretrained("openrlhf_reward")
    tiny_tokenizer.save_pretrained("openrlhf_reward")
    ours = scores_of_the_converted_model(page_of("openrlhf"), ids, len(tiny_tokenizer))
    torch.testing.assert_close(ours, theirs.score(theirs.model(ids).last_hidden_state), rtol=1e-5, atol=1e-6)

    options = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), options).eval()
    adapted.save_pretrained("llamafactory_reward")
    head = {
        "v_head.summary.weight": torch.randn(1, adapted.config.hidden_size),
        "v_head.summary.bias": torch.ones(1),
    }
    save_file(head, "llamafactory_reward/value_head.safetensors")
    ours = scores_of_the_converted_model(page_of("llamafactory"), ids, len(tiny_tokenizer))
    hidden = adapted(ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(ours, hidden @ head["v_head.summary.weight"].T, rtol=1e-4, atol=1e-5)
