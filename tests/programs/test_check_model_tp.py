"""python -m tools.check_model on two real ranks: sound plans pass, wrong ones fail and nothing hangs."""

import pytest

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


@pytest.fixture
def check(forks, tmp_path):
    """Run the tool; return its exit code, its line of the slices, and its last line."""

    def run(folder, *words):
        flags = [folder, "--tp_sizes", "2", "--max_new_tokens", "4", *words]
        done = forks.run("tools.check_model", flags, env={"PYTHONPATH": str(tmp_path)}, cwd=str(tmp_path))
        (line,) = [line for line in done.lines if line[5:].startswith("tensor parallel 2")]
        return done.code, line, done.lines[-1]

    return run


def test_check_model_accepts_a_sound_plan(check, tiny_model_folder):
    code, line, verdict = check(tiny_model_folder("falcon_new"))
    assert code == 0 and line.startswith("ok ") and "largest difference " in line
    assert verdict.startswith("ok: 4 checks of ")


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
def test_check_model_finds_a_wrong_plan(change, told, check, tiny_model_folder, tmp_path):
    (tmp_path / "wrong_plan.py").write_text(WRONG_PLANS.format(change=change))
    code, line, verdict = check(tiny_model_folder("gpt2"), "--plugins", "wrong_plan")
    assert code == 1 and line.startswith("FAIL ") and told in line
    assert verdict == "not ok: tensor parallel 2"
