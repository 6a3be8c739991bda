"""What a start costs in seconds of the processor, from the command to the end of a single step, beside those
of the libraries alone: processors differ.
"""

import os
import sys

import pytest
from program_runs import as_flags, run
from tiny_inputs import step_flags

pytestmark = pytest.mark.slow

PROGRAMS = {1: "step1_sft/main.py", 2: "step2_reward/main.py", 3: "step3_ppo/main.py"}
LIBRARIES = "import gc; gc.disable(); import torch, deepspeed; from transformers import LlamaForCausalLM"
STEP_LIMIT = 2.4  # times their seconds; it takes 1.5
PLAN_LIMIT = 1.35  # it takes 1.1, and 1.6 if it loads PEFT and collects garbage while it imports


def seconds_of(*words: str) -> tuple[str, float]:
    """The output of a program, and its time of the processor."""
    before = os.times()
    done = run([sys.executable, *words])
    now = os.times()
    seconds = now.children_user + now.children_system - before.children_user - before.children_system
    return done.stdout, seconds


@pytest.fixture
def library_seconds():
    """Seconds of the libraries alone, measured now."""
    return min(seconds_of("-c", LIBRARIES)[1] for _ in range(2))


@pytest.mark.parametrize("step", PROGRAMS)
def test_the_first_step_of_a_tiny_model_comes_soon(tiny, step, library_seconds):
    flags = step_flags(tiny, step, max_train_steps=1, dtype="fp32")
    text, seconds = seconds_of(PROGRAMS[step], *as_flags(flags))
    assert " 1/1 " in text and seconds < STEP_LIMIT * library_seconds, (seconds, library_seconds)


def test_a_plan_of_a_tiny_model_comes_soon(tiny, library_seconds):
    flags = step_flags(tiny, 3, data_path=None)
    plans = [seconds_of("-m", "tools.plan", "--stage", "3", *as_flags(flags)) for _ in range(2)]
    text, seconds = min(plans, key=lambda plan: plan[1])
    assert "fits: at the peak" in text and seconds < PLAN_LIMIT * library_seconds, (seconds, library_seconds)


def test_what_adapters_alone_need_is_not_imported(tiny):
    """PEFT loads bitsandbytes, and that torch's compiler: a second of a plan, a chat and a server."""
    code = "import sys, arena, chat, export, tools.plan, tools.check_model, serving.reward_server; "
    code += "print({'peft', 'bitsandbytes', 'matplotlib'} & set(sys.modules))"
    assert run([sys.executable, "-c", code]).stdout == "set()\n"
