"""Step 3 judged while it runs: it moves nothing of the training, and no number of ranks moves it."""

import functools
import gzip
import json

import pytest
import tiny_inputs
import torch
from program_runs import read_metrics
from reward_http_server import running_server
from test_resume import last_state, without_times
from tiny_inputs import step_flags

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny, forks, tmp_path_factory):
    """Run step 3 with changed flags and return its output folder; a second time, the first one's."""
    own = tiny_inputs.write_rows(tiny.folder / "held_out.jsonl", tiny_inputs.make_rows(9, seed=5))
    judging = {"eval_data_path": own, "eval_interval": 1, "keep_best": "eval/score", "save_rollouts": 2}

    @functools.cache
    def start(*, judged=True, ranks=1, **changes):
        rates = dict.fromkeys(("actor_learning_rate", "critic_learning_rate"), 3e-3)
        more = {"data_split": "0,0,1", "max_train_steps": 3, "num_warmup_steps": 0, "dtype": "fp32"}
        for batch in ("per_device_generation_batch_size", "per_device_training_batch_size"):
            more[batch] = 4 // ranks
        more |= {"value_norm": "exp", "output_dir": tmp_path_factory.mktemp("judged") / "output"}
        flags = step_flags(tiny, 3, **rates | more | (judging if judged else {}) | changes)
        done = forks.run(3, flags, ranks=ranks)
        assert done.codes == [0] * ranks, done.text()
        return flags["output_dir"]

    return start


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_with_and_without_it_the_training_is_equal_to_the_bit(run):
    judged, plain = run(enable_hybrid_engine=True), run(enable_hybrid_engine=True, judged=False)
    rows = [without_times(read_metrics(f, "policy/loss")) for f in (judged, plain)]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    texts = [
        [row for row in read_lines(f / "samples.jsonl") if "is_fixed" not in row] for f in (judged, plain)
    ]
    assert texts[0] == texts[1]
    (mine, numbers), (expected, plain_numbers) = last_state(judged), last_state(plain)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())
    assert numbers["trainer"].pop("evaluation")["step"] == 3
    assert numbers == plain_numbers


def test_before_during_and_after(run):
    output = run(enable_hybrid_engine=True)
    rows = read_metrics(output, "eval/score")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["eval/kl"] == pytest.approx(0, abs=1e-5) and rows[0]["eval/win_rate"] == 0.5
    assert any(row["eval/win_rate"] != 0.5 for row in rows) and rows[-1]["eval/kl"] != rows[0]["eval/kl"]
    assert all(r["eval/win_rate_low"] < r["eval/win_rate"] < r["eval/win_rate_high"] for r in rows)
    shown = [row for row in read_lines(output / "samples.jsonl") if "is_fixed" in row]
    assert [row["step"] for row in shown] == [step for step in range(4) for _ in range(4)], "once a step"
    assert all(row["row_id"].startswith("held_out.jsonl") and "score" in row for row in shown)
    assert len({row["answer"] for row in shown}) > 4, "an answer changes by the weights"
    best = max(rows, key=lambda row: row["eval/score"])
    told = json.loads((output / "export_best/triptych.json").read_text())
    assert told["best"] == {"metric": "eval/score", "value": best["eval/score"], "step": best["step"]}
    assert (
        json.loads((output / "export/triptych.json").read_text())["eval"]["eval/score"]
        == rows[-1]["eval/score"]
    )
    with gzip.open(output / "rollouts.jsonl.gz", "rt") as file:
        responses = [json.loads(line) for line in file]
    assert [row["step"] for row in responses] == [2] * 4 and {row["version"] for row in responses} == {1}
    (step,) = (row for row in read_metrics(output, "objective/kl") if row["step"] == 2)
    assert sum(row["kl"] for row in responses) / 4 == pytest.approx(step["objective/kl"], abs=1e-4)


def test_the_same_weights_give_the_same_answers(run):
    output = run(enable_hybrid_engine=True, actor_learning_rate=1e-30, save_rollouts=0)
    shown = [row for row in read_lines(output / "samples.jsonl") if "is_fixed" in row]
    assert len({(row["prompt"], row["answer"], row["score"]) for row in shown}) == 4
    rows = read_metrics(output, "eval/score")
    assert {row["eval/win_rate"] for row in rows} == {0.5}
    told = json.loads((output / "export_best/triptych.json").read_text())
    assert told["best"]["step"] == 0, "what is no better does not take its place"


def test_two_ranks_see_what_one_does(run):
    """Nine prompts on two ranks: the last batch is filled up, and what fills it counts nowhere."""
    one, two = run(enable_hybrid_engine=True), run(enable_hybrid_engine=True, ranks=2)
    for mine, theirs in zip(read_metrics(one, "eval/score"), read_metrics(two, "eval/score"), strict=True):
        names = [name for name in mine if name.startswith("eval/")]
        assert [mine[n] for n in names] == pytest.approx([theirs[n] for n in names], abs=2e-4), mine["step"]
    shown = [[r["answer"] for r in read_lines(f / "samples.jsonl") if "is_fixed" in r] for f in (one, two)]
    assert shown[0] == shown[1]


def test_a_judge_compares_with_the_answers_before_training_and_tells_what_it_costs(run):
    """The judge of the tests prefers the longer answer. Four prompts, whose answers samples.jsonl has."""
    with running_server() as server:
        judging = {
            "reward": f"judge:{server.judge_url}",
            "eval_prompts": 4,
            "keep_best": "eval/win_rate_judge",
        }
        one, two = (run(enable_hybrid_engine=True, ranks=ranks, **judging) for ranks in (1, 2))
    rows = read_metrics(one, "eval/win_rate_judge")
    shown = [row for row in read_lines(one / "samples.jsonl") if "is_fixed" in row]
    lengths = [[len(row["answer"]) for row in shown if row["step"] == step] for step in range(4)]
    wins = [
        [(now > then) + (now == then) / 2 for now, then in zip(of, lengths[0], strict=True)] for of in lengths
    ]
    assert [row["eval/win_rate_judge"] for row in rows] == [sum(of) / 4 for of in wins]
    assert len({sum(of) for of in wins}) > 1 and rows[0]["eval/win_rate_judge"] == 0.5
    others = read_metrics(two, "eval/win_rate_judge")
    assert [row["eval/win_rate_judge"] for row in others] == [row["eval/win_rate_judge"] for row in rows]
    steps = read_metrics(one, "reward/judge_calls")
    assert (
        all(row["reward/judge_calls"] + row["reward/judge_cached"] == 4 for row in steps) and len(steps) == 3
    )
    assert all(row["reward/judge_prompt_tokens"] == 7 * row["reward/judge_calls"] for row in steps)
    assert rows[0]["eval/judge_calls"] <= 4, "before training an answer is compared with itself"
    assert any(row["eval/judge_calls"] > 4 for row in rows[1:])
