"""Whole programs on a pretended GPU: what would crash there, and whether the numbers are a CPU's.

Two ranks have a GPU each, and nccl's rule: its collectives take no tensor of the CPU.
"""

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_tool_flags_act as others
import torch
from pretended_gpu import pretended_gpu
from program_runs import read_curve
from test_golden_losses import RUNS, check_losses
from test_zero_matrix import Job, check_same, flags_of, params

pytestmark = pytest.mark.slow
inputs = others.inputs  # the fixture


@pytest.mark.parametrize("name", RUNS)
def test_golden_losses(name, tiny, tmp_path, lone_process, no_pictures, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())
    with pretended_gpu() as gpu:
        check_losses(name, tiny, tmp_path / "output")
    assert not gpu.queries and not torch.backends.cuda.matmul.allow_tf32, "they are in fp32"


@pytest.mark.parametrize("name", ["sft", "reward", "grpo"])
def test_a_deterministic_run_has_no_sum_without_an_order(name, tiny, tmp_path, monkeypatch, lone_process):
    """grpo: its groups are added up by index, and answers sampled. The losses are those of any other run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    try:
        with pretended_gpu():
            check_losses(name, tiny, tmp_path / "output", deterministic=True)
            environment = [os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["FLASH_ATTENTION_DETERMINISTIC"]]
            assert environment == [":4096:8", "1"]
            assert torch.get_deterministic_debug_mode() == 2, "1: torch's attention would only warn"
            with pytest.raises(RuntimeError, match="deterministic"):
                torch.ones(3, device="cuda").cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


# Any stage, offload, precision, adapters and way of generating, each with most of the others.
JOBS = [
    Job(1, 1, offload="optimizer", dtype="bf16", ranks=1),
    Job(1, 2, lora=True, accumulation=2),
    Job(1, 3, lora=True, offload="all", dtype="bf16", ranks=1),
    Job(2, 0, lora=True, ranks=1, packed=200),
    Job(2, 3, offload="all"),
    Job(3, 0, ranks=1, tp=1, packed=110),
    Job(3, 1, tp=2),
    Job(3, 1, dtype="bf16", tp=2),
    Job(3, 2, ranks=1, algorithm="grpo", tp=1),
    Job(3, 2, lora=True, offload="optimizer", dtype="bf16", ranks=1, family="gpt2"),
    Job(3, 3, lora=True, offload="all", tp=2),
    Job(3, 3, tp=0),
    Job(3, 3, offload="param", ranks=1, family="gpt2", tp=1),
    Job(3, 3, offload="param", dtype="bf16", ranks=1, family="gpt2", tp=1),
    Job(3, 1, offload="optimizer", dtype="fp16", ranks=1, tp=1),
    Job(1, 2, lora=True, checkpointing=True),
    Job(2, 0, ranks=1, checkpointing=True, family="gpt2"),
    Job(3, 0, lora=True, ranks=1, tp=1, checkpointing=True),
    Job(3, 3, lora=True, tp=2, checkpointing=True),
]


# Graphs round the rows and positions of a decode pass up, several passes run before a look, a kernel reads
# the slots: other shapes and sums than a CPU's. In bf16 they round otherwise, so all are left out there.
PASSES_OF_A_CPU = {
    "at": "common.generation.generate:Generator.generate",
    "do": "exec:from common.generation.decode import DecodeStep as D;"
    "D._graphs, D.passes_per_check = (property(lambda s, n=n: n, lambda s, n: None) for n in (None, 1));"
    "import common.generation.inference_module as i, common.models.attention as a;"
    "i.choose_attention = a.plain_attention",
}


# A CPU computes the last layer's attention where it is read, a GPU's kernel all of it: bf16 rounds its sums
# otherwise.
WHOLE_ATTENTION = {
    "at": "common.models.policy_model:PolicyModel.__init__",
    "do": "exec:import common.models.attention as a; a.narrowed_modules = lambda _: []",
}


@pytest.fixture(scope="module")
def run(forks, tiny, tmp_path_factory):
    """Make a job's run where there is a GPU, or where there is none, once; return its output."""
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}

    @functools.cache
    def make(job: Job, *, on_gpu: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("job")
        (folder / "threshold.json").write_text(json.dumps(threshold))
        hooks = [PASSES_OF_A_CPU] if job.dtype == "bf16" and job.tp is not None else []
        more = {"gpu": {}, "hooks": hooks} if on_gpu else {"hooks": [WHOLE_ATTENTION][: job.dtype == "bf16"]}
        ran = forks.run(job.step, flags_of(job, tiny, folder), ranks=job.ranks, **more)
        assert ran.codes == [0] * job.ranks, "\n".join(ran.text(rank)[-4000:] for rank in range(job.ranks))
        for rank in range(job.ranks if on_gpu else 0):
            seen = ran.seen(rank)
            assert seen["device"] == f"cuda:{rank}" and seen["launches"] and not seen["queries"]
        return folder / job.name

    return make


@pytest.mark.parametrize("job", params(JOBS))
def test_numbers_are_those_of_a_cpu(job, run):
    found = run(job, on_gpu=True)
    if job.dtype == "fp16":  # no CPU trains in it
        names = ("policy/unsup_loss", "value/loss")
        first = [[read_curve(folder, name)[0] for name in names] for folder in (found, run(job.reference))]
        assert first[0] == pytest.approx(first[1], abs=0.05)
    else:
        check_same(job, found, run(job.reference if job.dtype == "fp32" else job))


@pytest.mark.parametrize("cls", others.RUNS)
def test_what_trains_nothing_says_the_same(cls, inputs, lone_process, capsys):
    """Chat with a second model and scores, the arena's answers, comparisons; threads answer, too."""
    flags = others.BASE[cls]
    if cls is others.chat.ChatArguments:
        flags = flags | {"compare": "{gpt2}", "reward": "{reward}"}
    expected = others.outcome(cls, flags, inputs, capsys)
    with pretended_gpu() as gpu:
        assert others.outcome(cls, flags, inputs, capsys) == expected
    assert gpu.launches and gpu.copies and not gpu.queries
