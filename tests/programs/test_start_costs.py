"""What a start costs, from the command to the end of a plan or of a first step: the modules that it imports
beside those of the libraries alone, and the collections of garbage. Both are counted, as seconds vary.
"""

import json
import sys

import pytest
from program_runs import as_flags, run
from tiny_inputs import step_flags

pytestmark = pytest.mark.slow

PROGRAMS = {1: "step1_sft/main.py", 2: "step2_reward/main.py", 3: "step3_ppo/main.py"}
LIBRARIES = "import torch, deepspeed; from transformers import LlamaForCausalLM"
COUNT = """
import atexit, gc, json, runpy, sys
def print_counts():
    print(json.dumps([len(sys.modules), gc.get_stats()[0]["collections"]]), file=sys.stderr)
atexit.register(print_counts)
"""
STEP_LIMIT = 1.4  # times the libraries' modules; it imports 1.3
PLAN_LIMIT = 1.15  # it imports 1.09, and 1.19 if it loads PEFT
COLLECTIONS = 100  # of a plan, which takes 61, and 975 if it collects garbage while it imports


def counts_of(code: str, *words: str) -> tuple[str, int, int]:
    """The output of a program, its modules, and its collections of the youngest generation."""
    done = run([sys.executable, "-c", COUNT + code, *words])
    return done.stdout, *json.loads(done.stderr.splitlines()[-1])


@pytest.fixture(scope="module")
def library_modules() -> int:
    """The number of modules that the libraries alone import."""
    return counts_of(LIBRARIES)[1]


@pytest.mark.parametrize("step", PROGRAMS)
def test_the_first_step_of_a_tiny_model_imports_little(tiny, step, library_modules):
    flags = step_flags(tiny, step, max_train_steps=1, dtype="fp32")
    code = f"runpy.run_path({PROGRAMS[step]!r}, run_name='__main__')"
    text, modules, _ = counts_of(code, *as_flags(flags))
    assert " 1/1 " in text and modules < STEP_LIMIT * library_modules, (modules, library_modules)


def test_a_plan_of_a_tiny_model_imports_little_and_collects_nothing_meanwhile(tiny, library_modules):
    flags = step_flags(tiny, 3, data_path=None)
    code = "runpy.run_module('tools.plan', run_name='__main__', alter_sys=True)"
    text, modules, collections = counts_of(code, "--stage", "3", *as_flags(flags))
    assert "fits: at the peak" in text
    assert modules < PLAN_LIMIT * library_modules, (modules, library_modules)
    assert collections < COLLECTIONS


def test_what_adapters_alone_need_is_not_imported(tiny):
    """PEFT loads bitsandbytes, and that torch's compiler: a second of a plan, a chat and a server."""
    code = "import sys, arena, chat, export, tools.plan, tools.check_model, serving.reward_server; "
    code += "print({'peft', 'bitsandbytes', 'matplotlib'} & set(sys.modules))"
    assert run([sys.executable, "-c", code]).stdout == "set()\n"
