"""python -m tools.doctor --learns: planted causes are named, and healthy runs raise no alarm."""

import json

import pytest
import tiny_inputs
import torch
from program_runs import as_flags
from tiny_inputs import step_flags
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

REWARDS = """
def count_fine(prompts, responses, rows):
    return [response.count("i") - 0.1 * len(response) for response in responses]

def constant(prompts, responses, rows):
    return [0.25] * len(responses)

def missing(prompts, responses, rows):
    return [float("nan")] * len(responses)

def mostly_missing(prompts, responses, rows):
    return [0.5] + [float("nan")] * (len(responses) - 1)
"""
HIDDEN_END = """
from common.data.stage_rows import RowBuilder

build_row = RowBuilder._sft_row

def hide_end(self, item, tokens):
    row = build_row(self, item, tokens)
    pairs = zip(row["input_ids"], row["loss_mask"])
    return row | {"loss_mask": [is_learned and token != self.template.eot_id for token, is_learned in pairs]}

RowBuilder._sft_row = hide_end
"""
OTHER_SAMPLER = """
from dataclasses import replace
from step3_ppo.roles import Actor

generate = Actor.generate

def generate_colder(self, batch, **more):
    self.sampling = replace(self.sampling, temperature=0.8)
    return generate(self, batch, **more)

Actor.generate = generate_colder
"""
MOVED_RATIO = """
from step3_ppo.hooks import register_hook

@register_hook("after_rollout")
def raise_logprobs(trainer, batch):
    for name in ("rollout_logprobs", "old_logprobs"):
        batch = batch.with_key(name, batch.data[name] + 0.01, like="response_ids")
    return batch
"""
FROZEN_ACTOR = """
from step3_ppo.hooks import register_hook

@register_hook("before_update")
def freeze(trainer, micro_batches):
    for group in trainer.roles.actor.model.optimizer.param_groups:
        group["lr"] = 0.0
"""
OPPOSITE_LOSS = """
from step3_ppo.hooks import register_hook

@register_hook("after_advantages")
def negate(trainer, batch):
    return batch.with_key("advantages", -batch.data["advantages"], like="response_ids")
"""
FAST = {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "critic_model_name_or_path": None}
BY_FUNCTION = FAST | {"reward": "function:rewards:count_fine"}
GROUPS = BY_FUNCTION | {"algorithm": "grpo", "num_samples_per_prompt": 8}


@pytest.fixture(scope="module")
def doctor(forks, tiny, tmp_path_factory):
    """Run the checks of a step with changed flags, and a plug-in if there is one; return the exit code, and
    state and text of each line by its subject.
    """

    def check(stage, plugin="", **flags):
        folder = tmp_path_factory.mktemp("doctor")
        (folder / "rewards.py").write_text(REWARDS)
        if plugin:
            (folder / "planted.py").write_text(plugin)
            flags |= {"plugins": "planted", "data_output_path": folder / "cache"}
        words = ["--learns", "--stage", stage, *as_flags(step_flags(tiny, stage, **flags))]
        done = forks.run("tools.doctor", words, cwd=str(folder))
        rows = [line for line in done.lines if line.startswith(("ok  ", "note  ", "problem  "))]
        lines = {line[9:31].strip(): (line[:8].strip(), line[32:]) for line in rows}
        assert done.code in (0, 1, 2), done.text()
        return done.code, lines, done

    return check


def problems_of(lines):
    return {name: text for name, (state, text) in lines.items() if state == "problem"}


@pytest.fixture(scope="module")
def judge(forks, tiny, tmp_path_factory):
    """A reward model that ranks the tiny pairs."""
    output = tmp_path_factory.mktemp("judge") / "output"
    flags = {"learning_rate": 3e-3, "num_train_epochs": 4, "output_dir": output, "eval_fraction": 0}
    done = forks.run(2, step_flags(tiny, 2, **flags))
    assert done.code == 0, done.text()
    return output / "export"


@pytest.mark.parametrize(
    ("stage", "flags", "names"),
    [
        (1, {"learning_rate": 1e-2}, "template, end in the loss, overfits one batch, end is sampled"),
        (2, {"learning_rate": 1e-3}, "template, end in the loss, longer is chosen, overfits one batch"),
        (
            2,
            {"learning_rate": 1e-3, "loss": "dpo", "label_smoothing": 0.2},
            "template, end in the loss, longer is chosen, overfits one batch",
        ),
        (2, {"learning_rate": 1e-3, "loss": "kto"}, "template, end in the loss, overfits one batch"),
        (
            3,
            GROUPS | {"gradient_accumulation_steps": 2},
            "template, prompts, sampler is trainer, responses end, rewards in a group, learns a length",
        ),
    ],
    ids=["sft", "reward model", "dpo", "kto", "grpo"],
)
def test_a_healthy_run_raises_no_alarm(stage, flags, names, doctor):
    code, lines, done = doctor(stage, **flags)
    assert code == 0 and not problems_of(lines), done.text()
    assert ", ".join(lines) == names
    assert done.lines[-1] == "ok: this run can learn"


def test_a_healthy_run_with_a_critic_raises_no_alarm_and_writes_nothing(doctor, judge, tmp_path):
    flags = FAST | {"critic_model_name_or_path": judge, "output_dir": tmp_path / "output"}
    code, lines, done = doctor(3, **flags)
    assert code == 0 and not problems_of(lines), done.text()
    assert [*lines][-4:] == ["rewards in a group", "reward model", "learns a length", "critic explains"]
    assert not (tmp_path / "output").exists()


def test_the_seed_decides_the_lines(doctor):
    lines, same, other = (doctor(3, **GROUPS, seed=seed)[2].lines for seed in (3, 3, 4))
    assert lines == same and lines != other


@pytest.mark.parametrize(
    ("stage", "flags", "plugin", "named"),
    [
        (1, {"learning_rate": 0}, "", {"overfits one batch": "no weight moves: --learning_rate"}),
        (2, {"learning_rate": 0}, "", {"overfits one batch": "no weight moves: --learning_rate"}),
        (
            1,
            {"learning_rate": 1e-2},
            HIDDEN_END,
            {"end in the loss": "0 of 48 rows train", "end is sampled": "responses of the fitted model end"},
        ),
        (1, {"learning_rate": 1e-2, "max_seq_len": 5}, "", {"end in the loss": "raise --max_seq_len 5"}),
        (
            3,
            GROUPS | {"reward": "function:rewards:constant"},
            "",
            {"rewards in a group": "0 of 4 groups have different scores (should be most); different"},
        ),
        (
            3,
            GROUPS | {"reward": "function:rewards:missing"},
            "",
            {"check_step": "gave 'nan' for response 1 of 32"},
        ),
        (
            3,
            GROUPS | {"reward": "function:rewards:mostly_missing", "reward_on_error": "default"},
            "",
            {"rewards in a group": "--reward fails for 31 responses"},
        ),
        (3, GROUPS | {"top_k": 1}, "", {"rewards in a group": "--temperature, --top_k"}),
        (3, GROUPS, OTHER_SAMPLER, {"sampler is trainer": "policy/logprob_gap"}),
        (3, GROUPS, MOVED_RATIO, {"sampler is trainer": "first policy/ratio 0.99"}),
        (3, GROUPS, FROZEN_ACTOR, {"learns a length": "no weight moves: --actor_learning_rate"}),
        (3, GROUPS, OPPOSITE_LOSS, {"learns a length": "look at --kl_coef"}),
        (
            3,
            GROUPS | {"actor_lora_dim": 4, "actor_lora_learning_rate": 0},
            "",
            {"learns a length": "no weight moves: --actor_learning_rate, --actor_lora_learning_rate"},
        ),
        (3, GROUPS | {"max_prompt_seq_len": 8}, "", {"prompts": "raise --max_prompt_seq_len 8"}),
        (
            3,
            BY_FUNCTION | {"critic_model_name_or_path": "{reward}", "critic_learning_rate": 0},
            "",
            {"critic explains": "no weight moves: --critic_learning_rate"},
        ),
        (
            3,
            GROUPS | {"reward": "model:{reward}"},
            "",
            {"reward model": "model is right in 0.30 of 50 pairs"},
        ),
    ],
    ids=lambda case: next(iter(case)).replace(" ", "_") if isinstance(case, dict) and case else None,
)
def test_a_planted_cause_is_named(stage, flags, plugin, named, doctor, tiny):
    values = {k: v.format(**vars(tiny)) if isinstance(v, str) else v for k, v in flags.items()}
    code, lines, done = doctor(stage, plugin, **values)
    problems = problems_of(lines)
    assert code == 1 and problems.keys() == named.keys(), done.text()
    for name, text in named.items():
        assert text in problems[name]
    assert done.lines[-1] == f"{len(named)} problems"


def test_equal_prompts_and_missing_pairs_are_named(doctor, tmp_path, tiny):
    rows = tiny_inputs.write_rows(tmp_path / "rows.jsonl", [{"prompt": "How are you?"}] * 20)
    code, lines, done = doctor(3, **GROUPS | {"data_path": rows, "reward": f"model:{tiny.reward}"})
    assert code == 1 and "1 of 20 differ" in problems_of(lines)["prompts"], done.text()
    assert lines["reward model"][0] == "note" and "--data_path has no pairs" in lines["reward model"][1]


def test_an_actor_that_never_ends_is_named(doctor, tmp_path, tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny.base)
    tokenizer = AutoTokenizer.from_pretrained(tiny.base)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    model.save_pretrained(tmp_path / "endless")
    tokenizer.save_pretrained(tmp_path / "endless")
    flags = GROUPS | {"actor_model_name_or_path": tmp_path / "endless", "max_answer_seq_len": 2}
    code, lines, done = doctor(3, **flags)
    assert code == 1 and "0.00 within --max_answer_seq_len 2" in problems_of(lines)["responses end"], (
        done.text()
    )


@pytest.mark.parametrize(
    ("end", "problems", "text"),
    [
        ("{{ eos_token }}\n", set(), "'probe reply<|endoftext|>' (should"),
        ("\n", {"template"}, "reply\\n<|endof"),
    ],
)
def test_a_template_without_an_end_is_named(end, problems, text, doctor, tmp_path, tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny.base)
    tokenizer = AutoTokenizer.from_pretrained(tiny.base)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    model.save_pretrained(tmp_path / "chatty")
    tokenizer.save_pretrained(tmp_path / "chatty")
    code, lines, done = doctor(1, model_name_or_path=tmp_path / "chatty", learning_rate=1e-2)
    assert code == len(problems) and problems_of(lines).keys() == problems, done.text()
    assert text in lines["template"][1] and lines["end is sampled"][1].startswith("4 of 4 responses")


def test_pairs_that_length_alone_ranks_are_noted(doctor, tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": "so so so so", "rejected": "so"} for n in range(20)]
    path = tiny_inputs.write_rows(tmp_path / "rows.jsonl", [json.loads(json.dumps(row)) for row in rows])
    code, lines, _ = doctor(2, data_path=path, learning_rate=1e-3)
    assert code == 0 and lines["longer is chosen"][0] == "note"
    assert lines["longer is chosen"][1].startswith("in 1.00 of 19 pairs")


def test_invalid_flags_leave_with_their_message(doctor):
    code, lines, done = doctor(3, **GROUPS | {"num_samples_per_prompt": 1, "kl_coef": -1})
    assert code == 2 and not lines and "--kl_coef -1" in done.text()
