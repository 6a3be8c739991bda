"""Every benchmark still runs: `--quick`, tiny sizes, without its peers."""

import gzip
import json
import math
import statistics
import sys
from itertools import combinations

import pytest
import torch
from program_runs import ROOT, read_curve, run
from tiny_inputs import step_flags

from benchmarks import bench_evidence
from benchmarks.bench_flops import Work, build_counter, forward_flops
from benchmarks.evidence.best_of_n import compare_at_equal_kl, expect_best, measure_best
from benchmarks.evidence.faults import FAULTS
from benchmarks.evidence.runs import summarise
from benchmarks.workload import small_llama_config
from common.models.output_head import LogitOptions, OutputHead

KEYS = {"name", "device", "threads", "ours", "peer", "ratio", "runs"}  # benchmarks/README.md says so
EVIDENCE = ROOT / "benchmarks/bench_evidence.py"
PROGRAMS = sorted({*(ROOT / "benchmarks").glob("bench_*.py")} - {EVIDENCE})

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_quick_benchmark_ends_with_its_json_line(forks, program):
    done = forks.run(f"benchmarks.{program.stem}", ["--quick"], seconds=240)
    assert done.code == 0, done.text()
    found = json.loads(done.lines[-1])
    assert found["name"] == program.stem.removeprefix("bench_")
    assert found.keys() >= KEYS
    assert found["ours"] > 0
    is_alone = "--trl_python is not given" in done.text()
    assert is_alone == ("peer_environment" in program.read_text())
    assert all((found[key] is None) == is_alone for key in ("peer", "ratio", "ratios") if key in found)


@pytest.mark.parametrize("name", bench_evidence.NAMES)
def test_quick_evidence_ends_with_its_facts(forks, name, tmp_path):
    command = [name, "--quick"]
    pairs = {"rewards": tmp_path / "train.jsonl", "preferences": tmp_path}
    if name in pairs:
        for part, first, end in (("train", 10, 90), ("eval", 100, 110)):
            rows = [{"prompt": f"{n}+4=", "chosen": f"{n + 4}", "rejected": "1"} for n in range(first, end)]
            (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command += ["--data_path", str(pairs[name])]
    done = forks.run("benchmarks.bench_evidence", command, seconds=300)
    assert done.code == 0, done.text()
    found = json.loads(done.lines[-1])
    assert found["name"] == name and f"{name} --quick" in found["command"]
    if name == "peers":
        assert "left out" in found["peers"]
        assert {"sft", "reward", "dpo", "kto", "grpo", "ppo"} <= found["tasks"].keys()
    if name == "preferences":
        learned, best = found["runs"]
        assert best["prompts"] == 4 and best["steps"][-1] == 32
        assert best["scores"] == sorted(best["scores"]) and best["judged"] != best["scores"]
        assert [row["step"] for row in found["at_equal_kl"]] == [1, 2]
        assert found["at_equal_kl"][-1]["scores"] == pytest.approx(learned["scores"][-1], abs=1e-6)
        assert found["reward"]["pairs"] == 10 and found["judge"]["accuracy"] <= 1
    if name == "stability":
        ours, mistaken = found["cases"].values()
        assert ours["kl"] != mistaken["kl"]


def test_the_best_of_n_is_the_mean_over_all_subsets():
    scores = [0.5, -1.0, 2.0, 0.25, 2.5, -0.75]
    responses = [{"scores": score, "judged": place**2} for place, score in enumerate(scores)]
    for n in range(1, 7):
        bests = [max(subset, key=lambda one: one["scores"]) for subset in combinations(responses, n)]
        expected = {name: statistics.fmean(best[name] for best in bests) for name in responses[0]}
        assert expect_best(responses, "scores", n) == pytest.approx(expected, abs=1e-12)


def test_the_best_of_n_is_read_prompt_by_prompt_from_a_run(tmp_path):
    """Prompt a has scores 1, 2, 3, 4 and b 10, 20, with lengths in the opposite order; so N = 2."""
    rows = [("a", score, 5 - score) for score in (1, 2, 3, 4)] + [("b", 10, 9), ("b", 20, 7)]
    with gzip.open(tmp_path / "rollouts.jsonl.gz", "wt") as file:
        for prompt, score, length in rows:
            file.write(json.dumps({"prompt": prompt, "score/model": score, "response_tokens": length}) + "\n")
    best = measure_best(tmp_path, {"scores": "score/model", "tokens": "response_tokens"}, "scores")
    assert best["steps"] == [1, 2] and best["prompts"] == 2
    assert best["kl"] == pytest.approx([0, math.log(2) - 0.5])
    # Of the six pairs of a's responses the best are 2, 3, 3, 4, 4, 4.
    assert best["scores"] == pytest.approx([(2.5 + 15) / 2, (20 / 6 + 20) / 2])
    assert best["tokens"] == pytest.approx([(2.5 + 8) / 2, (10 / 6 + 7) / 2])


def test_each_evaluation_is_compared_with_the_best_of_n_at_its_kl():
    best = {"kl": [0.0, 0.2, 0.6], "scores": [1.0, 2.0, 3.0]}
    run = {
        "name": "PPO",
        "seed": 1,
        "steps": [0, 5, 10, 15, 20],
        "kl": [0.0, 0.0, 0.1, 0.6, 0.7],
        "scores": [0, 3, 4, 5, 6],
    }
    rows = compare_at_equal_kl(run, best, ["scores"])
    assert [row["best_of_n_scores"] for row in rows] == pytest.approx([1.0, 1.5, 3.0, 3.0])
    assert [(row["step"], row["scores"], row["kl"], row["is_beyond"]) for row in rows] == [
        (5, 3, 0.0, False),
        (10, 4, 0.1, False),
        (15, 5, 0.6, False),
        (20, 6, 0.7, True),
    ]


def test_every_fault_of_stability_changes_the_numbers(forks, tiny, tmp_path):
    flags = {"enable_hybrid_engine": True, "packed": True, "max_tokens_per_micro_batch": 64}
    flags |= {"num_warmup_steps": 0, "actor_learning_rate": 1e-3, "max_train_steps": 2, "eval_fraction": 0.2}
    flags |= {"plugins": "benchmarks.evidence.faults"}
    numbers = {}
    for fault in ("", *FAULTS):
        output = tmp_path / f"fault {fault}"
        done = forks.run(3, step_flags(tiny, 3, output_dir=output, **flags), env={"FAULT": fault})
        assert done.code == 0, done.text()
        numbers[fault] = read_curve(output, "eval/kl")[-1]
    assert len(set(numbers.values())) == 1 + len(FAULTS), numbers


def test_ranks_do_not_wait_for_threads_that_their_parent_had():
    """Forked behind threaded work, they once did for ever; one is enough to see it."""
    code = """
import torch
from benchmarks.several_ranks import start_ranks
add_up = lambda: float(torch.ones(2**22).mul(2).sum())  # more than one thread computes by itself
torch.set_num_threads(2)
print(add_up(), start_ranks(add_up, 1))
"""
    done = run(["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-c", code], seconds=60)
    assert done.stdout.splitlines()[-1] == f"{2.0**23} {2.0**23}"


def test_a_case_is_summed_up_beside_the_runs_without_its_mistake():
    """A seed falls from .3 to .2 where it would rise to .9, the next ends alike, no third was run."""
    section = {"score": "scores", "metrics": {"scores": "", "kl": ""}, "means": {"gap": ""}}
    good, bad = (
        [{"scores": scores, "kl": [0.0, 1.0], "gap": 0.5} for scores in of]
        for of in (([0.3, 0.9], [0.4, 0.8], [0.3, 0.5]), ([0.3, 0.2], [0.4, 0.8]))
    )
    found = summarise(section, bad, good)
    assert found["collapsed"] == 1 and found["lowest"] == 0.2 and found["after"] == 0.5
    assert found["cost"] == pytest.approx([0.35, 0.0, 0.7])
    assert found["kl"] == 1.0 and found["gap"] == 0.5


def test_quick_grpo_benchmark_has_eight_responses_to_a_prompt(forks):
    done = forks.run("benchmarks.bench_ppo_step", ["--quick", "--algorithm", "grpo"])
    found = json.loads(done.lines[-1])
    assert found["name"] == "grpo_step" and "16 prompts x 8" in found["model"]
    assert "make_peer_env.sh trl-1.16" in done.text()


def test_needed_flops_are_those_by_hand():
    """Two responses to the prompt 1 2 3; nothing reads their last tokens, and both read the prompt's."""
    work = Work.of([[([1, 2, 3, 4, 5], {2, 3}), ([1, 2, 3, 6, 7, 8], {2, 3, 4})]])
    assert work == Work(tokens=6, pairs=1 + 2 + 3 + 4 + 4 + 5, read_tokens=4, read_pairs=3 + 4 + 4 + 5)
    sizes = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    keys_values, others = 2 * 4 * 2, 2 * 4 * 4 + 3 * 4 * 8
    matrices = 6 * (keys_values + others + keys_values) + 4 * others
    attention = 2 * 4 * (19 + 16)
    found = forward_flops(small_llama_config(num_hidden_layers=2, **sizes), work, 10)
    assert found == 2 * (matrices + attention + 4 * 10 * 4)


def test_products_of_attention_the_output_head_and_onednn_are_seen():
    query = torch.randn(1, 2, 6, 4, requires_grad=True)
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    with build_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        head = OutputHead(hidden, weight, None, LogitOptions())
        head.logprobs(torch.arange(3))[0].sum().backward()
        torch.ops.mkldnn._linear_pointwise(hidden.detach(), weight.detach(), None, "none", [], "")
    product, logits = 2 * 2 * 6 * 6 * 4, 2 * 3 * 10 * 4
    assert counter.get_total_flops() == (2 + 5) * product + (1 + 2 + 1) * logits
