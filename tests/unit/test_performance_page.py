"""docs/performance.md, algorithms.md, results.md and the README say what the committed runs say."""

import copy
import difflib
import json
import re
import statistics

import pytest

from benchmarks.evidence.runs import mean_curve, read_section
from benchmarks.measuring import best
from common.models.tensor_ops import wilson_interval
from docs import make_performance
from docs.make_performance import COMMAND, GPU_TESTS, ROOT, as_row, update_page

WORD_PROBLEMS = read_section("verifiable")
ALGORITHMS = (ROOT / "docs/algorithms.md").read_text()
PAGE = make_performance.PAGE.read_text()
BASELINES = make_performance.read_baselines()


def test_the_tables_are_those_of_the_baselines():
    assert update_page(PAGE, BASELINES) == PAGE, f"docs/performance.md is old; run: {COMMAND}"


def test_a_new_baseline_changes_its_rows_only():
    name = "train.smollm2.cpu.json"
    new = copy.deepcopy(BASELINES[name]) | {"commit": "0123abc", "threads": 1}
    new["sections"]["dpo"]["rates"]["ours, packed"]["median"] = 1234.5
    changes = [
        line
        for line in difflib.ndiff(PAGE.splitlines(), update_page(PAGE, {name: new}).splitlines())
        if line.startswith("+ ")
    ]
    rate, source = changes
    assert rate.startswith("+ | ours, packed | 1,234 |")
    assert source.startswith(
        f"+ Baseline: [{name}](../benchmarks/baselines/{name}), commit 0123abc, 1 thread; "
    )
    new["sections"]["dpo"]["rates"]["ours, unknown"] = {"median": 1.0, "low": 1.0, "high": 1.0}
    with pytest.raises(ValueError, match=rf"no line for {name}: \| ours, unknown"):
        update_page(PAGE, {name: new})
    other_columns = {"runs": 1 if new["runs"] > 1 else 3}  # the next baseline's tables have them
    with pytest.raises(ValueError, match=rf"no line for {name}: \| ours, packed \| "):
        update_page(PAGE, {name: new | other_columns})


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_told_with_its_command_and_ratio(name):
    baseline = BASELINES[name]
    assert f"```bash\n{baseline['command']}\n```" in PAGE
    assert f"{baseline['ratio']:.2f}" in PAGE


def test_the_gpu_section_has_the_ppo_steps_and_the_tests():
    for name, case in BASELINES["gpu.h200.json"]["sections"]["ppo"].items():
        phases = case["phases"]
        scores = sum(phases[role] for role in ("actor_score", "reference", "critic", "reward"))
        cells = [f"{case['median']:.2f}", f"{case['low']:.2f} to {case['high']:.2f}"]
        cells += [f"{phases['generate']:.2f}", f"{scores:.2f}"]
        cells += [f"{phases[role]:.2f}" for role in ("actor_update", "critic_update")]
        cells += [f"{case['peak_gib']:.1f}", f"{case['planned_gib']:.1f}"]
        assert as_row([name, *cells]) in PAGE
    tests = json.loads((ROOT / "benchmarks/baselines" / GPU_TESTS).read_text())["tests"]
    outcomes = list(tests.values())
    told = f"{outcomes.count('passed')} of {len(outcomes)} pass, {outcomes.count('skipped')} need a second"
    assert told in PAGE


def over_in_generation(way: str) -> float:
    """Our tokens a second on chat lengths over those of the best way whose name begins so."""
    rates = BASELINES["generate.cpu.json"]["sections"]["chat"]["rates"]
    return best(rates, "ours") / best(rates, way)


def test_the_readme_says_the_same():
    readme = (ROOT / "README.md").read_text()
    ppo, memory = BASELINES["ppo_step.cpu.json"], BASELINES["memory.cpu.json"]
    assert f"on a CPU, a PPO step in {ppo['ours']:.1f} seconds where TRL takes {ppo['peer']:.1f}" in readme
    assert f"an SFT step's memory {memory['ratio']:.1f} times smaller" in readme
    batched, plain = (over_in_generation(way) for way in ("generate_batch", "generate,"))
    assert f"{batched:.1f} times as fast as transformers' continuous batching" in readme
    assert f"{plain:.1f} times as fast as its `generate` at chat lengths, on a CPU" in readme
    assert f"{plain:.2f} over `generate` at its best batch" in PAGE


# ---- every committed run --------------------------------------------------------------------------------

RESULTS = (ROOT / "docs/results.md").read_text()
ROWS = [line for line in RESULTS.split("\n## ")[1].splitlines() if line.startswith("| ")][1:]


def row_of(file: str) -> str:
    """The one row that links a file of the repository."""
    link = f"]({file.removeprefix('docs/')})" if file.startswith("docs/") else f"](../{file})"
    [row] = [row for row in ROWS if link in row]
    return row


def test_every_committed_run_has_its_row():
    folders = ("docs/demo", "docs/verifiable", "benchmarks/baselines", "tests/golden")
    files = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert len({row_of(str(file)) for file in files}) == len(ROWS)
    for name, baseline in BASELINES.items():
        row = row_of(f"benchmarks/baselines/{name}")
        threads = "1 thread |" if baseline["threads"] == 1 else f"{baseline['threads']} threads |"
        assert f"| `{baseline['command']}` |" in row and threads in row
        assert f"{baseline['ratio']:.2f}" in row
        is_cpu = baseline["device"] == "cpu"
        assert (
            ("CPU, " in row or "pretended GPU, " in row)
            if is_cpu
            else f"{baseline['device'].split()[-1]}, " in row
        )


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "ppo", "grpo"])
def test_the_last_golden_loss_is_told(name):
    row = row_of(f"tests/golden/{name}.txt")
    metric, told = re.search(r"last `(\S+)` (\S+) ", row).groups()
    lines = [line.split() for line in (ROOT / f"tests/golden/{name}.txt").read_text().splitlines()]
    [*_, (last_step, _, value)] = [line for line in lines if line[1] == metric]
    assert told == f"{float(value):.4f}" and f", {last_step} steps " in row and f" -k {name}`" in row


@pytest.mark.parametrize("file", ["docs/demo/summary.json", "docs/demo/smollm2/summary.json"])
def test_the_demo_is_told(file):
    demo, row = json.loads((ROOT / file).read_text()), row_of(file)
    assert f"{demo['seconds']:.0f} seconds, {demo['peak_gib']:.1f} GiB" in row
    assert f"{demo['target_sft']:.2f} before PPO, {demo['target_ppo']:.2f} after" in row


def test_the_word_problems_are_told_with_their_intervals():
    file, page = "docs/verifiable/gsm.json", ALGORITHMS
    told, row = json.loads((ROOT / file).read_text()), row_of(file)
    total, last = told["held_out_problems"], {}
    assert f"| `{told['command']}` |" in row and f"{told['sft_seconds']} seconds" in page
    for run in told["runs"]:
        rates = [wilson_interval(run["eval/pass_rate"][step] * total, total) for step in ("0", "20", "40")]
        cells = [f"{rate.value:.2f} ({rate.low:.2f} to {rate.high:.2f})" for rate in rates]
        told_cells = " | ".join([f"`{run['algorithm']}`", str(run["seed"]), *cells, str(run["seconds"])])
        assert f"| {told_cells} |" in page
        last.setdefault(run["algorithm"], []).append(f"{rates[-1].value:.2f}")
    assert all(f"{name} {', '.join(values)}" in row for name, values in last.items())


# ---- sections of evidence -------------------------------------------------------------------------------

FILES = [path for path in (ROOT / "docs/results").glob("*.json") if path.stem != "judges"]  # docs/exports.md
EVIDENCE = {path.stem: json.loads(path.read_text()) for path in FILES}
SECTIONS = {name: (ROOT / f"docs/results/{name}.md").read_text() for name in EVIDENCE}


@pytest.mark.parametrize("name", EVIDENCE)
def test_a_section_names_its_command_its_file_and_its_figure(name):
    found, section = EVIDENCE[name], SECTIONS[name]
    assert f"```bash\n{found['command']}\n```" in section
    assert f"[{name}.json]({name}.json), commit {found['commit']}" in section
    assert f"({name}.svg)" in section
    summary = next(of for of in RESULTS.split("\n## ") if f"](results/{name}.md)" in of)
    assert f"```bash\n{found['command']}\n```" in summary and "**Against us first**" in summary
    assert f"`{found['command']}`, **planned**" not in RESULTS and RESULTS.count("\n") <= 250


def told_scores(scores: list[float], decimals: int = 2) -> str:
    """The mean of the seeds, the lowest and the highest, as the pages write them."""
    return f"{statistics.fmean(scores):.{decimals}f} ({min(scores):.2f} to {max(scores):.2f})"


@pytest.mark.parametrize("section", ["stability", "mismatch", "bf16_gap"])
def test_what_each_case_ends_with_is_told(section):
    found = EVIDENCE[section]
    for name, case in found["cases"].items():
        runs = [run["scores"] for run in found["runs"] if run["name"] == name]
        mean, low, high = (f"{value:.3f}".replace("-0.000", "0.000") for value in case["cost"])
        half_way = statistics.fmean(scores[len(scores) // 2] for scores in runs)
        cells = [name, str(len(runs)), f"{half_way:.2f}", f"{case['after']:.3f}"]
        cells += [f"{case['lowest']:.2f} to {case['highest']:.2f}", f"{case['deviation']:.3f}"]
        cells += [str(case["collapsed"]), f"{mean} ({low} to {high})", f"{case['kl']:.2f}"]
        assert as_row(cells) in SECTIONS[section]


@pytest.mark.parametrize("case", EVIDENCE["rewards"]["cases"])
def test_what_a_reward_model_learns_of_pairs_is_told(case):
    runs = [run for run in EVIDENCE["rewards"]["runs"] if run["name"] == case]
    for place, pairs in enumerate(runs[0]["pairs"]):
        cells = [case, f"{pairs:,}", told_scores([run["accuracy"][place] for run in runs], 3)]
        for name in ("loss", "calibration_error", "prefers_longer", "length_correlation"):
            cells.append(f"{statistics.fmean(run[name][place] for run in runs):.2f}")
        assert as_row(cells) in SECTIONS["rewards"]


@pytest.mark.parametrize("name", WORD_PROBLEMS["cases"])
def test_what_each_algorithm_learns_is_told(name):
    found, words = EVIDENCE["verifiable"]["cases"][name], WORD_PROBLEMS["cases"][name]["words"]
    runs = [run for run in EVIDENCE["verifiable"]["runs"] if run["name"] == name]
    assert [run["seed"] for run in runs] == [1, 2, 3]
    scores, seconds = (mean_curve(runs, metric, "samples") for metric in ("scores", "seconds"))
    cells = [f"{score:.2f}" for score in scores.values[1:]]
    cells += [f"{found['lowest']:.2f} to {found['highest']:.2f}"]
    cells += [f"{seconds.last:.0f}" if name in WORD_PROBLEMS["panels"]["algorithms"] else ""]
    cells += [f"`{words}`" if words != name else ""]
    assert as_row([f"`{name}`", *cells]) in SECTIONS["verifiable"]
    assert f"{scores.values[0]:.2f} before" in SECTIONS["verifiable"]
    assert scores.steps == [0, 1280, 2560, 3840, 5120]


def cells_of_a_run(run: dict) -> list[str]:
    """PPO of real preferences: scores before and after, KL, wins, what the critic explains, peak."""
    cells = [run["name"], str(run["seed"])]
    cells += [f"{run[key][0]:.2f}, {run[key][-1]:.2f}" for key in ("scores", "judged")]
    cells += [f"{run['kl'][-1]:.2f}"]
    cells += [
        "{:.2f} ({:.2f} to {:.2f})".format(*(run[f"win_rate{key}"][-1] for key in ("", "_low", "_high")))
    ]
    cells += [f"{run['tokens'][0]:.0f}, {run['tokens'][-1]:.0f}"]
    cells += [f"{statistics.fmean(run['explained'][part]):.2f}" for part in (slice(5), slice(-5, None))]
    return [*cells, f"{run['peak_gib'][-1]:.1f}", f"{run['seconds'][-1] / 60:.0f}"]


def test_ppo_of_real_preferences_is_told():
    found, section = EVIDENCE["preferences"], SECTIONS["preferences"]
    *runs, best_of_n = found["runs"]
    rows = [cells_of_a_run(run) for run in runs]
    for row in found["at_equal_kl"]:
        cells = [row["name"], str(row["seed"]), str(row["step"]), f"{row['kl']:.2f}"]
        mark = "*" if row["is_beyond"] else ""
        for key in ("scores", "judged"):
            cells += [f"{row[key]:.2f}", f"{row[f'best_of_n_{key}']:.2f}{mark}"]
        rows.append(cells)
        assert row["scores"] < row["best_of_n_scores"]  # "in every run, at every KL"
    for place, n in enumerate(best_of_n["steps"]):
        values = [best_of_n[key][place] for key in ("kl", "scores", "judged")]
        rows.append([str(n), *(f"{value:.2f}" for value in values), f"{best_of_n['tokens'][place]:.0f}"])
    for name in ("reward", "judge"):
        of = found[name]
        accuracy = f"{of['accuracy']:.3f} ({of['accuracy_low']:.2f} to {of['accuracy_high']:.2f})"
        rest = [f"{of[key]:.2f}" for key in ("prefers_longer", "longer_is_chosen", "length_correlation")]
        rows.append([name, accuracy, *rest])
    assert [row for row in map(as_row, rows) if row not in section] == []
    assert f"{best_of_n['prompts']} held-out prompts" in section


# ---- scale, planned -------------------------------------------------------------------------------------

SCALE, SCALE_SECTION = EVIDENCE["scale"], SECTIONS["scale"]


def kind_seconds(row: dict, kind: str) -> str:
    """The seconds of a kind of phase, as the page writes them."""
    return f"{sum(of['seconds'] for name, of in row['phases'].items() if name.split()[0] == kind):.1f}"


@pytest.mark.parametrize("case", dict.fromkeys(row["case"] for row in SCALE["counted"]))
def test_bytes_on_ranks_are_told_beside_the_plans(case):
    rows = [row for row in SCALE["counted"] if row["case"] == case]
    gaps = [
        abs(found / row["planned"][phase] - 1)
        for row in rows
        for phase, found in row["received"].items()
        if found
    ]
    sent = max(row["on_wire"] / row["expected_on_wire"] - 1 for row in rows)
    cells = [f"{sum(row['received'].values()) / 1e6:.1f}" for row in rows]
    cells += [
        f"{100 * max(gaps):.1f} %",
        f"{100 * sent:.1f} %",
        f"{max(row['control'] for row in rows) / 1e3:.0f}",
    ]
    assert as_row([case, *cells]) in SCALE_SECTION


@pytest.mark.parametrize("row", SCALE["planned"], ids=lambda row: f"{row['model']}-{row['gpus']}")
def test_planned_seconds_are_told(row):
    cells = [row["model"], f"{row['gpus']:,}", f"{row['gib']:,.1f}"]
    if row["fits"]:
        of_kinds = [kind_seconds(row, kind) for kind in ("switch", "generate", "score", "train")]
        bound = f"{row['largest']}: {row['phases'][row['largest']]['bound']}"
        cells += [f"t = {row['flags']['inference_tp_size']}", *of_kinds, f"{row['seconds']:.1f}", bound]
    else:
        cells.append("does not fit")
    is_told = as_row(cells) in SCALE_SECTION
    assert is_told == (row["gpus"] in (8, 64, 256, 1024))


def test_the_scale_section_names_its_anchor():
    anchor = SCALE["anchor"]
    assert f"{anchor['planned']} seconds where {anchor['published']} are published" in SCALE_SECTION
    shares = [f"{100 * share:.0f} %" for share in SCALE["generation_share"].values()]
    told = re.findall(r"\d+ %", SCALE_SECTION.partition("generation's share of that")[2])
    assert told == shares
    assert "not run" in SCALE_SECTION


def test_the_next_bottleneck_is_what_the_plan_says():
    rows = {(row["model"], row["gpus"]): row for row in SCALE["planned"]}
    few, many = rows["70B", 64], rows["70B", 1024]
    token, update = (many["phases"][name]["by_cause"] for name in ("generate", "train actor"))
    told = [
        f"a 70B model's step becomes {few['seconds'] / many['seconds']:.1f} times shorter",
        f"read all weights ({token['memory']:.1f} seconds), start their kernels ({token['kernels']:.1f})",
        f"sum over 8 ranks ({token['hops']:.1f})",
        f"{update['hops']:.1f} seconds of the actor's update",
        f"whose arithmetic takes {update['arithmetic']:.1f}",
    ]
    for row, verb in ((few, "from "), (many, "it grows to ")):
        share = row["phases"]["generate"]["seconds"] / row["seconds"]
        told.append(f"{verb}{100 * share:.0f} %")
    assert [words for words in told if words not in SCALE_SECTION] == []


# ---- the same work as peers -----------------------------------------------------------------------------

PEERS, PEERS_SECTION = EVIDENCE["peers"], SECTIONS["peers"]
TRAIN, MEMORY = BASELINES["train.cpu.json"]["ratios"], BASELINES["memory.cpu.json"]
SPEED = TRAIN | {name: BASELINES[f"{name}_step.cpu.json"]["ratio"] for name in ("ppo", "grpo")}
PEAK = {"sft": MEMORY["ratio"], "reward": MEMORY["reward_ratio"]}


@pytest.mark.parametrize("task", PEERS["tasks"])
def test_losses_and_scores_beside_trl_are_told(task):
    found = PEERS["tasks"][task]
    cells = [f"{table[task]:.2f}" if task in table else "" for table in (SPEED, PEAK)]
    if task in ("grpo", "ppo"):
        cells += [told_scores(found[side][end]) for end in ("first", "last") for side in ("ours", "trl")]
    else:
        cells += [f"{found[side]:.4f}" for side in ("ours", "trl")]
        cells += [f"{found[step]:.0e}" for step in ("first", "last", "largest")]
    assert as_row([task, *cells]) in PEERS_SECTION


@pytest.mark.parametrize(
    ("peer", "way"),
    [
        ("transformers' `generate`", "generate,"),
        ("transformers' continuous batching", "generate_batch"),
        ("DeepSpeed's rollout", "DeepSpeed"),
    ],
)
def test_generation_beside_peers_is_told(peer, way):
    assert f"| generation, {peer} | {over_in_generation(way):.2f} |" in PEERS_SECTION
