"""Every family goes through all three steps, two also DPO, on tiny random models, which are then asked."""

import math

import pytest
from program_runs import read_curve, read_metrics, run_here
from tiny_configs import CONFIGS, tiny_config
from tiny_inputs import step_flags
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.data.example import Message
from common.flags.args import Problems
from serving.answering import Sampling, load_answerer, load_template
from serving.arguments import AnsweringArguments

pytestmark = pytest.mark.slow

# LoRA finds the matrices of each family by itself; two whose layers lie the other way round are enough.
WITH_LORA = ("gpt2", "falcon")


@pytest.fixture
def run_step(tiny, tmp_path, lone_process, no_pictures):
    shared = {"eval_fraction": 0.1, "max_train_steps": 2, "save_interval": 0}

    def run(step, name, **more):
        folder = tmp_path / name
        of_step = {"enable_hybrid_engine": True} if step == 3 else {"learning_rate": 1e-3}
        run_here(step, step_flags(tiny, step, **shared | of_step | more, output_dir=folder))
        return folder

    return run


def save_base(family, folder, tokenizer):
    config = tiny_config(family, len(tokenizer))
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", CONFIGS)
def test_three_steps(family, run_step, tiny_tokenizer, tmp_path):
    base = save_base(family, tmp_path / "base", tiny_tokenizer)
    lora = {"lora_dim": 2} if family in WITH_LORA else {}
    sft = run_step(1, "sft", model_name_or_path=base, **lora)
    reward = run_step(2, "reward", model_name_or_path=base, **lora)
    models = {"actor_model_name_or_path": sft / "export", "critic_model_name_or_path": reward / "export"}
    ppo = run_step(3, "ppo", **models, **({"actor_lora_dim": 2} if lora else {}))

    assert all(math.isfinite(x) for x in read_curve(sft, "sft/loss") + read_curve(reward, "reward/loss"))
    rows = read_metrics(ppo, "objective/score")
    assert len(rows) == 2 and all(abs(row["policy/logprob_gap"]) < 1e-4 for row in rows)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-4)  # the actor is the reference still
    AutoModelForSequenceClassification.from_pretrained(reward / "export")
    asked = [ppo]
    if lora:
        asked.append(run_step(2, "dpo", model_name_or_path=sft / "export", loss="dpo"))
        assert read_curve(asked[-1], "dpo/loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    for folder in asked:
        path, problems = str(folder / "export"), Problems()
        args = AnsweringArguments()
        template = load_template("--path", path, args, problems)
        assert problems.messages == []
        answerer = load_answerer(path, template, args, Sampling(4))
        [text] = answerer.answer([Message("user", "How is the weather?")])
        assert isinstance(text, str)
