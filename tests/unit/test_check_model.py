"""python -m tools.check_model: sound models pass, each kind of error fails its own line."""

import math
import weakref
from dataclasses import dataclass

import pytest
import torch
import transformers
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from common.generation.tp_plans import PLANS
from common.models.loading import ModelOptions, build_position_ids, load_causal_lm
from common.models.output_head import LogitOptions
from tools import check_model
from tools.check_model import Finding, choose_sizes, compare, likeliest_finding, main, tolerance_of

QUICK = ("--tp_sizes", "1", "--max_new_tokens", "6")
SCORING = ("log-probabilities", "packed rows")
CAUSAL = ("log-probabilities", "cached decoding", "their log-probabilities")


@dataclass
class Shown:
    """What a run said."""

    code: int
    out: str
    errors: str

    def __post_init__(self):
        self.lines = self.out.splitlines()
        rows = [line for line in self.lines if line[:5].strip() in ("ok", "FAIL", "note")]
        self.states = {row[5:30].strip(): row[:5].strip() for row in rows}
        self.texts = {row[5:30].strip(): row[30:] for row in rows}

    def failed(self):
        return [name for name, state in self.states.items() if state == "FAIL"]


@pytest.fixture
def check(capfd):
    """Runs the check in this process."""

    def run(*words):
        code = 0
        try:
            main([*map(str, words)])
        except SystemExit as leaving:
            code = leaving.code
        return Shown(code, *capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("family", "takes_packed_rows"), [("llama", True), ("gpt2", True), ("gemma2", False)]
)
def test_a_sound_model_passes(family, takes_packed_rows, tiny_model_folder, check):
    shown = check(tiny_model_folder(family), *QUICK)
    assert shown.code == 0 and [shown.states[name] for name in CAUSAL] == ["ok"] * 3
    assert shown.lines[0].endswith("fp32 on cpu; 4 rows of 2 to 41 tokens")
    num_right, _, num_tokens, told = shown.texts["cached decoding"].split(maxsplit=3)
    assert num_right == num_tokens in ("17", "18")  # 6, 4, 2, 6: two slots are filled again
    assert told.startswith("tokens are transformers' likeliest: ")
    num_checks = 4 if takes_packed_rows else 3
    assert ("packed rows" in shown.states) == takes_packed_rows
    assert shown.lines[-1] == f"ok: {num_checks} checks of {tiny_model_folder(family)}, all within rounding"


def test_padding_of_the_vocabulary_is_left_out(tmp_path, tiny_tokenizer, check):
    model = AutoModelForCausalLM.from_config(tiny_config("llama", len(tiny_tokenizer) + 64))
    with torch.no_grad():
        model.lm_head.weight[len(tiny_tokenizer) :] *= 1000  # transformers would say nothing else
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert check(tmp_path, *QUICK).code == 0


def see_padding(inputs, **_):
    """Take padded rows with a mask that is not causal; what packed rows take is left out."""
    arguments = {"input_ids": inputs.input_ids, "attention_mask": None, "position_ids": None}
    return arguments | {"use_cache": False, "is_causal": False}


@pytest.mark.parametrize(
    ("family", "name", "wrong", "failed"),
    [
        ("llama", "models.policy_model.read_logit_transform", lambda _: LogitOptions(1.01), SCORING),
        ("gpt2", "generation.decode.build_position_ids", lambda m: build_position_ids(m) + 1, CAUSAL[1:]),
        ("llama", "models.model_inputs.ModelInputs.model_arguments", see_padding, SCORING),
    ],
    ids=["factor of the logits", "positions of the cached pass", "padding that is seen"],
)
def test_what_is_wrong_fails_its_own_line(tiny_model_folder, check, monkeypatch, family, name, wrong, failed):
    load_causal_lm(ModelOptions(tiny_model_folder(family)), 320)  # its family is known to be right
    monkeypatch.setattr(f"common.{name}", wrong)
    shown = check(tiny_model_folder(family), *QUICK)
    assert shown.code == 1 and shown.failed() == list(failed)
    assert shown.lines[-1] == f"not ok: {', '.join(failed)}"


def test_what_a_model_raises_is_a_finding_and_the_other_checks_run(tiny_model_folder, check, monkeypatch):
    def refuse(model):
        raise ValueError("does to its logits what is neither a factor nor a cap")

    load_causal_lm(ModelOptions(tiny_model_folder("opt")), 320)  # its family is known to be right
    monkeypatch.setattr("common.models.policy_model.read_logit_transform", refuse)
    shown = check(tiny_model_folder("opt"), *QUICK)
    assert shown.code == 1 and shown.failed() == ["log-probabilities"]
    assert shown.texts["log-probabilities"].startswith("ValueError: does to its logits what is neither")
    assert shown.states["cached decoding"] == "ok"


def test_packed_rows_are_compared_where_the_attention_takes_them(tiny_model_folder, check, monkeypatch):
    # Without a kernel transformers makes a mask of blocks from the positions; BLOOM has no positions.
    monkeypatch.setattr("tools.check_model.takes_packed", lambda model: True)
    assert check(tiny_model_folder("llama"), *QUICK).states["packed rows"] == "ok"
    assert check(tiny_model_folder("bloom"), *QUICK).failed() == ["packed rows"]


def test_a_tie_is_no_failure():
    def found(*gaps):
        return likeliest_finding(torch.tensor(gaps), 1e-3)

    assert found(0.0, 0.0, 5e-4, 0.0).is_ok
    wrong = found(0.0, 0.0, 5e-4, 2.5)
    assert wrong.is_ok is False and wrong.text.startswith("3 of 4 tokens are transformers' likeliest")
    assert found(0.0, math.nan).is_ok is False


def test_a_head_that_was_not_saved_is_told(tmp_path, tiny_tokenizer, check):
    transformers.AutoModel.from_config(tiny_config("mistral", len(tiny_tokenizer))).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    shown = check(tmp_path, *QUICK)
    assert shown.code == 0 and "has no output head: lm_head.weight is newly initialised" in shown.errors


# ---- tensor parallel: what one process can tell; the ranks are in tests/programs/test_check_model_tp.py


def test_sizes_up_to_four_are_run_once_the_model_is_gone(tiny_model_folder, check, monkeypatch):
    def load(*args):
        model = loaded(*args)
        seen.append(weakref.ref(model))
        return model

    def run(function, arguments, **_):
        job, folder = arguments
        alive.append((job.tp_size, seen[0]() is not None))
        torch.save((torch.tensor([5.0]), torch.tensor([5.0])), f"{folder}/logits.pt")

    seen, alive, loaded = [], [], check_model.load_causal_lm
    monkeypatch.setattr(check_model, "load_causal_lm", load)
    monkeypatch.setattr("torch.multiprocessing.start_processes", run)
    shown = check(tiny_model_folder("gpt2"), "--max_new_tokens", "4")
    assert shown.code == 0 and alive == [(2, False), (4, False)] and len(seen) == 1
    assert shown.texts["tensor parallel 2"].startswith("largest difference 0.0e+00, at most 1.5e-04")


def test_a_size_that_does_not_work(tiny_model_folder, check):
    shown = check(tiny_model_folder("llama"), "--tp_sizes", "3", "--max_new_tokens", "2")
    assert shown.code == 1 and shown.failed() == ["tensor parallel 3"]
    assert shown.texts["tensor parallel 3"].endswith("sizes that work for this model: 1, 2, 4")


def test_no_plan_is_a_remark_unless_a_size_was_asked_for(monkeypatch):
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2", 320))
    monkeypatch.delitem(PLANS, "gpt2")
    for sizes, is_ok in (((), None), ((1,), None), ((2,), False)):
        [finding], to_run = choose_sizes(model, sizes)
        assert finding.is_ok is is_ok and not to_run
        assert finding.text.startswith("the family 'gpt2' has no tensor-parallel plan; use --infer")


# ---- flags, rows, lines


def test_what_is_no_causal_lm_is_told(tmp_path, tiny_tokenizer, check):
    t5 = transformers.T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    for name, auto_class, config in (
        ("t5", transformers.AutoModel, t5),
        ("reward", transformers.AutoModelForSequenceClassification, tiny_config("llama", 320)),
    ):
        auto_class.from_config(config).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    for name, told in (
        ("absent", "absent is neither a model folder nor an available hub model: there is no such"),
        ("reward", "reward is a classifier; give a causal LM"),
        ("t5", "the model cannot be loaded: Unrecognized configuration class"),
    ):
        shown = check(tmp_path / name)
        assert shown.code == 2 and told in shown.errors


def test_a_model_of_few_positions_is_refused(tmp_path, tiny_tokenizer, check):
    config = tiny_config("llama", len(tiny_tokenizer))
    config.max_position_embeddings = 56
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    shown = check(tmp_path)
    assert shown.code == 2 and "57 tokens are more than the model's 56 positions" in shown.errors


def test_lines_and_tolerances():
    assert tolerance_of(torch.float32, 0.1) == 3e-5
    assert tolerance_of(torch.bfloat16, 10.0) == pytest.approx(0.4)
    finding = compare("a", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.4, "why")
    assert finding.is_ok is False and finding.text == "largest difference 5.0e-01, at most 4.0e-01  (why)"
    assert not compare("a", torch.tensor([math.nan]), torch.zeros(1), 1.0, "").is_ok
    assert Finding("name\x1b", "text", True).line().plain == r"ok   name\x1b" + 20 * " " + "text"
