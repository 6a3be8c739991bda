"""python -m tools.report: metrics, marks, diagnostics of made-up runs; what is torn or missing is named."""

import math
import re
from xml.dom import minidom

import pytest
from made_runs import Page, over_steps, write_run

from step3_ppo.rollout_correction import BINS
from tools.report import LAYOUT
from tools.report.__main__ import main
from tools.report.charts import (
    draw_bars,
    draw_curve,
    draw_trail,
    is_noisy,
    render_picture,
    render_svg,
    shown,
    smooth,
    spread,
)
from tools.report.diagnostics import HACKING, find_diagnostics
from tools.report.page import as_duration, build_page, differing_flags, find_phases
from tools.report.run_reader import Curve, build_curves, read_run, read_runs
from tools.report.samples import Answer, find_changes, group_answers, mark_changes

HARMLESS = {
    *"html head meta title style body main header section div p h2 h3 b ul li table tr th td span".split(),
    *"details summary figure figcaption svg g defs use path text circle ins del wbr".split(),
}
PPO = {
    "objective__score": lambda s: s / 10,
    "objective__kl": lambda s: s / 5,
    "rollout__response_tokens": lambda s: 20.0,
}


def panel_of(x, y, **how) -> str:
    return render_svg([(0, "", Curve(list(x), list(y)))], "x", **how)


def page_of(*folders) -> Page:
    return Page(build_page([read_run(folder) for folder in folders]))


def test_a_picture_is_a_file_of_its_own_and_names_its_curves_in_their_colors():
    curve = Curve([0, 1, 2], [0.1, 0.3, 0.2])
    picture = render_picture({"a < b": {"one": curve, "two": curve}, "c": {"one": curve}}, "GPUs")
    texts = [node.firstChild.data for node in minidom.parseString(picture).getElementsByTagName("tspan")]
    assert texts == ["one", "two", "one"]
    assert (
        'fill="var(--c1)">two' in picture
        and ">a &lt; b</text>" in picture
        and picture.count("GPUs</text>") == 2
    )
    assert "prefers-color-scheme: dark" in picture


# --- Files


def test_read_run_of_curves_and_state(tmp_path):
    rows = [*over_steps(3, sft__loss=lambda s: 1 / s), {"step": 3, "sft/eval_loss": 0.25, "seconds": 7.5}]
    run = read_run(write_run(tmp_path / "a", rows, flags={"seed": 1}, about={"num_steps": 3}))
    assert run.curves["sft/loss"].steps == [1, 2, 3] and run.curves["sft/loss"].last == pytest.approx(1 / 3)
    assert (run.kind, run.last_step, run.num_steps, run.seconds, run.notes) == ("sft", 3, 3, 7.5, [])
    assert run.state == "finished, 3 steps"


def test_build_curves_keeps_the_last_value_of_a_repeated_step():
    curve = build_curves([{"step": 1, "a/b": 1.0}, {"step": 2, "a/b": 2.0}, {"step": 1, "a/b": 3.0}])["a/b"]
    assert (curve.steps, curve.values) == ([1, 2], [3.0, 2.0])


def test_torn_lines_and_files_are_named_and_the_rest_is_shown(tmp_path):
    folder = write_run(tmp_path, over_steps(2, sft__loss=lambda s: 1.0))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('"sft/loss": 3}\n{"step": 3, "sft/loss": 1.0}\n[]\n{}\n{"step": 4, "sft/lo')
    (folder / "args.json").write_text('{"seed": ')
    (folder / "run.json").write_text('{"starts": 5}')
    (folder / "samples.jsonl").write_bytes(b"\xff\xfe{}")
    run = read_run(folder)
    assert run.curves["sft/loss"].steps == [1, 2, 3]
    assert run.notes == [
        "metrics.jsonl: torn lines are skipped (line 3, 5, 6, ...)",
        "args.json is missing or torn",
        "run.json is missing or torn",
        "samples.jsonl: torn lines are skipped (line 1)",
    ]
    assert "samples.jsonl: torn" in page_of(folder).text


def test_a_run_without_a_step_has_a_page(tmp_path):
    for name in ("metrics.jsonl", "args.json"):
        (tmp_path / name).write_text("{")
    assert "metrics.jsonl has no step yet" in page_of(tmp_path).text


def test_a_folder_that_is_no_run_is_named_with_runs_inside_it(tmp_path):
    write_run(tmp_path / "step1", over_steps(1, sft__loss=lambda s: 1.0))
    with pytest.raises(ValueError, match=r"is not a run's folder: it has neither .* did you mean .*step1\?"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        read_run(tmp_path / "nothing")


# --- The page


def test_the_page_has_the_numbers(tmp_path):
    rows = over_steps(30, **PPO)
    rows[0]["policy/grad_norm"] = 1.0
    rows[-1] |= {"seconds": 100.0, "policy/grad_norm": None}
    rows += [{"step": step, "eval/score": step / 8, "eval/win_rate": 0.5} for step in (0, 4)]
    data = {"num_raw_rows": 99, "num_train": 60, "num_eval": 20, "num_truncated": 2, "num_tokens": 7}
    start = {"world_size": 2, "device": "GPU X", "data_key": "abc", "global_rows": 3, "data": data}
    starts = [start | {"time": str(i), "versions": {"torch": f"9.{i}"}} for i in (8, 9)]
    about = {"num_steps": 40, "defaults": {"seed": 1234, "kl_coef": 0.1}, "starts": starts}
    page = page_of(write_run(tmp_path / "ppo", rows, flags={"seed": 7, "kl_coef": 0.1}, about=about))
    for text in ("step 30 of 40", "0:01:40", "2 × GPU X", "9.9", "abc", "1, 1 × not finite",
                 "60 of 99 raw rows", "truncated2, 2.5 %", "passes over the rows1.50",
                 "held-out prompts, against the responses before training"):  # fmt: skip
        assert text in page.text, text
    assert sum(tag == "tr" and of.get("class") == "bad" for tag, of in page.tags) == 1, "torch has changed"
    tiles = page.text[: page.text.index("Curves")]
    assert "eval/score0.5from 0" in tiles
    assert "objective/score3from 0.1" in tiles and "objective/kl6from 0.2" in tiles
    changed = page.text[page.text.index("not at its default") : page.text.index("all 2 flags")]
    assert "".join(changed.split()).endswith("--seed71234") and "--kl_coef" not in changed


def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path):
    evil = "</div><script>alert(1)</script><img src=x onerror=alert(1)> & \"quotes' \x00"
    samples = [
        {"step": step, "prompt": f"P {evil}", "answer": f"A {evil} {step}", "score": 1.0} for step in (1, 2)
    ]
    samples.append({"step": 2, "prompt": f"once {evil}", "answer": evil})
    rows = over_steps(12, **PPO)
    rows[0][f"objective/{evil}"] = 1.0
    flags = {"seed": 1, "eot_token": evil, evil: [evil]}
    about = {"defaults": {"eot_token": evil + "x"}, "starts": [{"device": evil, "versions": {evil: evil}}]}
    folders = [write_run(tmp_path / f"<i>{n}", rows, samples, flags | {"seed": n}, about) for n in (1, 2)]
    text = build_page([read_run(folder) for folder in folders], [evil])
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= HARMLESS
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")], tag
        assert (attributes.get("xlink:href") or "#").startswith("#"), "of this page"
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    assert page.text.count("<script>alert(1)</script>") >= 6, "shown as it is"


def test_what_changed_in_the_answer_to_a_prompt_is_marked(tmp_path):
    samples = [
        {"step": 1, "prompt": "Hi?", "answer": "I am very fine today", "row_id": "greeting-1"},
        {"step": 1, "prompt": "Well?", "answer": "Well.", "row_id": "<once>"},
        {"step": 5, "prompt": "Hi?", "answer": "I am so fine today"},
        {"step": 9, "prompt": "Hi?", "answer": "I am so fine today"},
    ]
    text = build_page([read_run(write_run(tmp_path, over_steps(9, **PPO), samples))])
    assert "greeting-1 3 steps" in text and "<span>&lt;once&gt;</span>" in text
    assert "I am <del>very</del><ins>so</ins> fine today" in text
    assert text.count("<ins>") == 2, "one in the explanation" and "(unchanged)" in text


def test_an_answer_is_compared_with_its_runs_own_earlier_one_else_with_the_other_runs(tmp_path):
    keys = ((1, 0, 0, "a"), (1, 0, 1, "b"), (1, 1, 0, "c e"), (2, 1, 0, "c e f"), (3, 1, 0, "c e f"))
    answers = [Answer(*key, score=None) for key in keys]
    mark_changes(answers)
    same, marked = [[("same", "a")], [("same", "b")]], [[("new", "c e")], [("same", "c e"), ("new", " f")]]
    assert [answer.changes for answer in answers] == [*same, *marked, [("same", "c e f")]]
    assert [answer.same_as for answer in answers] == [None, None, None, None, 1]
    samples = [{"step": s, "prompt": "p", "answer": a} for s, a in ((1, "x"), (1, "y"), (2, "z"))]
    groups = group_answers([read_run(write_run(tmp_path, over_steps(2, **PPO), samples))])
    assert [(a.step, a.index, a.text) for a in groups["p"]] == [(1, 0, "x"), (1, 1, "y"), (2, 0, "z")]


def test_several_runs_lie_over_one_another(tmp_path):
    flags = {"kl_coef": 0.1, "output_dir": "a"}
    first = write_run(tmp_path / "a", over_steps(20, **PPO), flags=flags | {"seed": 1})
    second = write_run(tmp_path / "b", over_steps(20, **PPO), flags=flags | {"seed": 2, "output_dir": "b"})
    sft = write_run(tmp_path / "sft", over_steps(20, sft__loss=lambda s: 3.0))
    assert differing_flags([read_run(first), read_run(second)]) == {"seed": [1, 2]}
    for number in "12":
        write_run(tmp_path / number / "output", over_steps(1, **PPO))
    runs, _ = read_runs([tmp_path / "1" / "output", tmp_path / "2" / "output"])
    assert [run.name for run in runs] == ["1/output", "2/output"]
    page = page_of(first, second, sft)
    title = page.text.index("objective/score", page.text.index("Curves"))
    assert page.text[title:].removeprefix("objective/score").split()[:2] == ["2", "2"]
    section = page.text.partition("Diagnostics of reward hacking")[2].partition("what is looked")[0]
    assert "b: none of the" in section and "sft" not in section


def test_find_phases_sum_to_the_run_time(tmp_path):
    of_step = {"step": 3.0, "actor_update": 1.5, "generate": 1.0, "of_my_own": 0.25, "rest": 0.25}
    rows = over_steps(4, **{f"perf__{name}_seconds": lambda s, v=v: v for name, v in of_step.items()})
    rows[2]["perf/save_seconds"] = 2.0
    rows[3]["seconds"] = 20.0
    folder = write_run(tmp_path, rows)
    assert "generation 0:00:04, 20 %" in page_of(folder).text
    assert list(find_phases(read_run(folder)).items()) == [
        ("generation", 4.0), ("update of the actor", 6.0), ("rest of the steps", 1.0), ("checkpoints", 2.0),
        ("of my own", 1.0), ("outside steps", 6.0),
    ]  # fmt: skip


def test_a_large_run_makes_a_small_page(tmp_path):
    rows = over_steps(20000, **PPO | {f"policy__n{i}": lambda s: math.sin(s) for i in range(10)})
    assert len(build_page([read_run(write_run(tmp_path, rows))])) < 400_000


# --- Diagnostics


def seen_in(**metrics) -> list[str]:
    found = find_diagnostics(build_curves(over_steps(50, **metrics)))
    return [one["title"] for one, seen in found if seen]


SCORE, KL = "objective__score", "objective__kl"
CORRELATION, TOKENS = "objective__score_length_correlation", "rollout__response_tokens"
FINISHED, DISTINCT = "rollout__finished_fraction", "rollout__distinct_2"
ENTROPY, VARIANCE = "policy__entropy", "value__explained_variance"
DEVIATION, CLIPPED = "objective__score_std", "objective__clipped_fraction"
SOUND = PPO | {
    CORRELATION: lambda s: 0.1,
    FINISHED: lambda s: 0.95,
    DISTINCT: lambda s: 0.9,
    ENTROPY: lambda s: 3.0 - s / 50,
    VARIANCE: lambda s: s / 100,
    DEVIATION: lambda s: 0.1,
}


def test_a_sound_run_shows_nothing_and_few_steps_say_nothing():
    assert seen_in(**SOUND) == []
    few = build_curves(over_steps(9, policy__entropy=lambda s: float(s < 5)))
    assert find_diagnostics(few) == []


# What shows a pattern, and a neighbour that does not: metrics over the steps 1 to 50.
HACKS = {
    "The score falls while KL rises (over-optimisation)": (
        {SCORE: lambda s: min(s, 60 - s), KL: lambda s: s / 5}, {KL: lambda s: 6.0}),
    "The score stagnates while KL rises": (
        {SCORE: lambda s: min(s, 20), KL: lambda s: s / 5}, {KL: lambda s: min(s, 20) / 5 + s / 100}),
    "The score is bought with length": (
        {CORRELATION: lambda s: s / 130, TOKENS: lambda s: 20 + s}, {TOKENS: lambda s: 20.0}),
    "Responses do not end": (
        {FINISHED: lambda s: 1 - s / 130}, {FINISHED: lambda s: 1 - s / 200}),
    "Responses have become very short": (
        {TOKENS: lambda s: 60 - s}, {TOKENS: lambda s: 60 - s / 2}),
    "Responses repeat each other, or themselves": (
        {DISTINCT: lambda s: 0.9 - s / 100}, {DISTINCT: lambda s: 0.9 - s / 250}),
    "The policy has stopped exploring": (
        {ENTROPY: lambda s: 3 * 0.95**s}, {ENTROPY: lambda s: 3 * 0.98**s}),
    "KL is negative": (
        {KL: lambda s: -s / 50}, {KL: lambda s: -0.2}),
    "The critic is worse than a constant": (
        {VARIANCE: lambda s: 0.4 - s / 50}, {VARIANCE: lambda s: -0.4 + s / 50}),
    "All responses have the same score": (
        {DEVIATION: lambda s: float(s < 10)}, {DEVIATION: lambda s: 1 / (1 + s)}),
    "Scores are clipped": (
        {CLIPPED: lambda s: s / 100}, {CLIPPED: lambda s: 1 / (9 + s)}),
    "Another reward falls while the score rises": (
        {SCORE: lambda s: s, f"{SCORE}_b": lambda s: -s, "objective__agreement_b": lambda s: 0},
        {f"{SCORE}_b": lambda s: s}),
}  # fmt: skip


@pytest.mark.parametrize("title", HACKS)
def test_a_pattern_is_seen_and_its_neighbour_is_not(title):
    assert HACKS.keys() == {one["title"] for one in HACKING}
    shows, changes = HACKS[title]
    assert title in seen_in(**shows)
    assert title not in seen_in(**shows | changes)


def test_diagnostics_find_a_rising_held_out_loss():
    assert seen_in(sft__eval_loss=lambda s: abs(s - 20)) == ["The held-out loss rises again"]
    assert seen_in(dpo__eval_loss=lambda s: abs(s - 20)) == ["The held-out DPO loss rises again"]
    assert seen_in(sft__eval_loss=lambda s: 60 - s, dpo__eval_loss=lambda s: 60 - s) == []


def test_weak_judges_and_skipped_steps_are_told_with_their_numbers():
    of = {"eval_accuracy": 0.55, "eval_pairs": 8, "eval_accuracy_low": 0.3, "eval_accuracy_high": 0.8}
    of |= {"eval_length_correlation": -0.7}
    rows = [{"step": 1, "perf/bad_steps": 3} | {f"reward/{name}": value for name, value in of.items()}]
    assert {one["title"]: seen for one, seen in find_diagnostics(build_curves(rows))} == {
        "Steps were skipped": "3 steps were skipped",
        "The reward model is barely better than chance": (
            "it ranks 55.0 % of 8 held-out pairs correctly (95 % interval 30.0 to 80.0 %)"
        ),
        "The reward model prefers length": "held-out scores and lengths correlate by -0.7",
    }


def test_chosen_answers_that_lose_probability():
    title = ["Chosen answers lose probability too"]
    for chosen, rejected, seen in ((-1.0, -2.5, title), (-1.0, -4.0, []), (0.5, -2.0, [])):
        rewards = {"dpo__eval_chosen_reward": chosen, "dpo__eval_rejected_reward": rejected}
        assert seen_in(**{name: lambda s, v=value: v for name, value in rewards.items()}) == seen


def test_a_finding_stands_on_the_page_with_its_rule(tmp_path):
    rows = over_steps(50, **PPO | {"rollout__distinct_2": lambda s: 0.9 - s / 100})
    text = page_of(write_run(tmp_path, rows)).text
    assert "Responses repeat each other, or themselves: distinct-2 went from 0.845 to 0.445." in text
    assert "Rule: distinct-2, the share of distinct token pairs" in text
    assert "1 of the 6 patterns that were looked for can be seen" in text


# --- Words and charts


def test_changes_are_by_words_unless_hardly_one_has_stayed():
    assert find_changes("the cat sat.", "the dog sat!") == [
        ("same", "the "), ("gone", "cat"), ("new", "dog"), ("same", " sat"), ("gone", "."), ("new", "!"),
    ]  # fmt: skip
    assert find_changes("a b c d", "x b y z") == [("new", "x b y z")]  # 2 of 8 words


def test_shown_numbers_spread_and_durations():
    values = [0, 0.5, 1234567.0, 0.00001, 12345, -3.14159, 99.999, 0.0123456]
    assert [shown(v) for v in values] == ["0", "0.5", "1.235e6", "1e-5", "12,345", "-3.142", "100", "0.01235"]
    assert spread(range(10), 4) == [0, 3, 6, 9] and spread([1], 4) == [1]
    assert [as_duration(seconds) for seconds in (4.25, 59.6, 18420)] == ["0:00:04", "0:01:00", "5:07:00"]


def test_only_noise_is_smoothed_by_centred_means():
    schedule = [min(i, 100 - i) for i in range(100)]
    assert not is_noisy(schedule) and is_noisy([(-1) ** i * 5 + i for i in range(100)])
    texts = [panel_of(range(100), values) for values in (schedule, [0.0, 1.0] * 50)]
    assert ["opacity: 0.28" in text for text in texts] == [False, True]
    assert smooth([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0], [0.0, 1e-300], [1e149, -1e149], [-5.0] * 50])
def test_any_curve_can_be_drawn(values):
    for draw in (draw_curve, draw_trail, draw_bars):
        text = panel_of(range(len(values)), values, draw=draw)
        Page(text)
        assert "nan" not in text and "inf" not in text


def test_a_point_stands_where_its_numbers_say():
    text = panel_of([0, 5, 10], [0.0, 1.0, 2.0])
    points = [a for t, a in Page(text).tags if t == "circle"]
    assert (points[1]["cx"], points[1]["cy"]) == ("198.0", "88.0")  # halves of 46..350 and 10..166
    assert "step 5: 1" in text and "L 198 88 " in text


def test_a_histogram_is_of_the_last_step(tmp_path):
    """A22: a bar a share; the metrics have no panel of their own, and a page without them no histogram."""
    names = LAYOUT["histograms"][0]["metrics"]
    assert names == [f"correction/{name}" for name in BINS]
    shares = {name.replace("/", "__"): lambda s, i=i: s * (i + 1) / 100 for i, name in enumerate(names)}
    page = build_page([read_run(write_run(tmp_path / "a", over_steps(4, **PPO, **shares)))])
    bars = re.findall(r"<title>weight (\d): ([\d.]+)</title>", page)
    assert bars == [("1", "0.04"), ("2", "0.08"), ("3", "0.12"), ("4", "0.16"), ("5", "0.2")]
    assert f"{names[0]} over the steps" not in page
    plain = build_page([read_run(write_run(tmp_path / "b", over_steps(4, **PPO)))])
    assert "importance weights" not in plain


# --- The program


def test_the_program_writes_the_page_beside_the_run(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "größe", over_steps(3, **PPO))
    main([str(folder)])
    printed = capsys.readouterr()
    assert f"wrote {folder / 'report.html'}" in printed.out and "run.json is missing or torn" in printed.err
    text = (folder / "report.html").read_bytes().decode("utf-8")
    assert "objective/<wbr>score" in text and "<title>größe</title>" in text
    monkeypatch.chdir(tmp_path)
    main([str(folder), str(tmp_path / "nothing"), "--output", "both.html"])
    assert "nothing does not exist" in capsys.readouterr().err
    assert "nothing does not exist" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no run is named: give --output_dir"),
        (["{}/a", "--output", "{}"], "cannot be written (Is a directory)"),
        (["{}/a", "--output", "{}/none/x.html"], "cannot be written (No such file or directory)"),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path, capsys, words, said):
    write_run(tmp_path / "a", over_steps(3, **PPO))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as left:
        main([word.format(tmp_path) for word in words])
    assert left.value.code == 2 and said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
