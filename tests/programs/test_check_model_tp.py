"""python -m tools.check_model on two real ranks: sound plans pass, wrong ones fail and nothing hangs."""

import sys

import pytest
from program_runs import run

pytestmark = pytest.mark.slow

WRONG_PLANS = """
from common.generation.tp_plans import PLANS, Column, Row, all_heads, register_tp_plan

whole = PLANS["gpt2"]

@register_tp_plan("gpt2")
def wrong(config):
    plan = whole(config)
    {change}
    return plan
"""


def check(folder, *words, may_fail=False):
    flags = ["--tp_sizes", "2", "--max_new_tokens", "4", *words]
    done = run([sys.executable, "-m", "tools.check_model", folder, *flags], may_fail=may_fail)
    (line,) = [line for line in done.stdout.splitlines() if line[5:].startswith("tensor parallel 2")]
    return done.returncode, line, done


def test_slices_compute_what_the_whole_does(tiny_model_folder):
    code, line, done = check(tiny_model_folder("falcon_new"))
    assert code == 0 and line.startswith("ok ") and "largest difference " in line
    assert done.stdout.splitlines()[-1].startswith("ok: 4 checks of ")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ('plan["h.*.attn.c_attn"] = Column()  # queries, keys and values mixed up', "largest difference "),
        (
            'del plan["h.*.mlp.c_fc"]  # all neurons meet half of the next weights',
            "a rank failed: RuntimeError: ",
        ),
    ],
)
def test_a_wrong_plan_fails(change, told, tiny_model_folder, tmp_path, monkeypatch):
    (tmp_path / "wrong_plan.py").write_text(WRONG_PLANS.format(change=change))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, line, done = check(tiny_model_folder("gpt2"), "--plugins", "wrong_plan", may_fail=True)
    assert code == 1 and line.startswith("FAIL ") and told in line
    assert done.stdout.splitlines()[-1] == "not ok: tensor parallel 2"
