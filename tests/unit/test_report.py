"""python -m tools.report: numbers, marks and remarks of made-up runs; what is torn or missing is named."""

import json
import math

import pytest
from made_runs import Page, over_steps, write_run

from common.runs.report.page import build_page
from common.runs.report.run_files import NoRun, build_curves, name_runs, read_run
from common.runs.report.run_tables import changed_flags, differing_flags, find_phases
from common.runs.report.sample_cards import Answer, find_earlier, group_answers
from tools.report import main

HARMLESS = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "div", "p", "h2",
            "h3", "b", "br", "ul", "li", "table", "tr", "th", "td", "code", "span", "details", "summary",
            "figure", "figcaption", "svg", "path", "text", "circle", "rect", "ins", "del", "wbr"}  # fmt: skip
PPO = {
    "objective__score": lambda s: s / 10,
    "objective__kl": lambda s: s / 5,
    "rollout__response_tokens": lambda s: 20.0,
}


def page_of(*folders) -> Page:
    return Page(build_page([read_run(folder) for folder in folders]))


# ---------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------


def test_a_run_is_read(tmp_path):
    rows = [*over_steps(3, sft__loss=lambda s: 1 / s), {"step": 3, "sft/eval_loss": 0.25, "seconds": 7.5}]
    run = read_run(write_run(tmp_path / "a", rows, flags={"seed": 1}, about={"num_steps": 3}))
    assert run.curves["sft/loss"].steps == [1, 2, 3] and run.curves["sft/loss"].last == pytest.approx(1 / 3)
    assert (run.kind, run.last_step, run.num_steps, run.seconds, run.notes) == ("sft", 3, 3, 7.5, [])


def test_held_out_scores_head_the_page_from_before_the_first_step_on(tmp_path):
    rows = [{"step": step, "eval/score": step / 8, "eval/win_rate": 0.5} for step in (0, 4)]
    assert read_run(write_run(tmp_path / "begun", rows[:1])).kind == "ppo"
    page = page_of(write_run(tmp_path / "run", rows))
    assert "eval/score0.5from 0" in page.text[: page.text.index("Curves")]
    assert "held-out prompts, against the answers before training" in page.text


def test_a_step_that_comes_twice_counts_once_with_its_last_value():
    curve = build_curves([{"step": 1, "a/b": 1.0}, {"step": 2, "a/b": 2.0}, {"step": 1, "a/b": 3.0}])["a/b"]
    assert (curve.steps, curve.values) == ([1, 2], [3.0, 2.0])


def test_a_torn_last_line_and_strange_lines_are_named_and_the_rest_is_shown(tmp_path):
    folder = write_run(tmp_path, over_steps(2, sft__loss=lambda s: 1.0))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('[1]\nnull\n{"step": 3, "sft/loss": 1.0}\n{"step": 4, "sft/lo')
    (folder / "args.json").write_text('{"seed": ')
    run = read_run(folder)
    assert run.curves["sft/loss"].steps == [1, 2, 3]
    assert run.notes == [
        "the last line of metrics.jsonl is torn: the run was killed in it, or is writing it now",
        "metrics.jsonl: 2 lines are no JSON objects and are left out (line 3, 4)",
        "args.json is no JSON object, or torn",
        "run.json is missing",
    ]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe{}", b"{}\n[]\n", b'{"step": "x", "a/b": 1}\n', b"[" * 99999]
)
def test_a_file_of_anything_is_no_error(tmp_path, content):
    for name in ("metrics.jsonl", "samples.jsonl", "args.json", "run.json"):
        (tmp_path / name).write_bytes(content)
    run = read_run(tmp_path)
    assert run.curves == {} and "metrics.jsonl has no step yet" in run.notes
    Page(build_page([run]))


@pytest.mark.parametrize(
    "about",
    [{"starts": 3}, {"starts": [3, {}]}, {"starts": [{"versions": 1}]}, {"defaults": []}, {"num_steps": "9"}],
)
def test_a_run_json_of_another_form_is_no_error(tmp_path, about):
    page_of(write_run(tmp_path, over_steps(2, sft__loss=lambda s: 1.0), flags={"seed": 1}, about=about))


def test_a_folder_that_is_no_run_is_named_with_runs_inside_it(tmp_path):
    write_run(tmp_path / "step1", over_steps(1, sft__loss=lambda s: 1.0))
    with pytest.raises(NoRun, match=r"is no run's folder: it has neither .* did you mean .*step1\?"):
        read_run(tmp_path)
    with pytest.raises(NoRun, match="does not exist"):
        read_run(tmp_path / "nothing")


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    folders = [tmp_path / "a" / "output", tmp_path / "b" / "output"]
    assert name_runs(folders) == ["a/output", "b/output"]
    assert name_runs([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]
    assert len(set(name_runs([tmp_path, tmp_path]))) == 2


# ---------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_numbers(tmp_path):
    rows = over_steps(30, **PPO, perf__step_seconds=lambda s: 2.0, perf__rest_seconds=lambda s: 1.5,
                      perf__generate_seconds=lambda s: 0.5)  # fmt: skip
    rows[-1]["seconds"] = 100.0
    about = {
        "num_steps": 40,
        "defaults": {"seed": 1234, "kl_coef": 0.1},
        "starts": [{"world_size": 2, "device": "GPU X", "data_key": "abc", "versions": {"torch": "9.9"}}],
    }
    page = page_of(write_run(tmp_path / "ppo", rows, flags={"seed": 7, "kl_coef": 0.1}, about=about))
    for text in ("step 30 of 40", "1 min 40 s", "2 × GPU X", "9.9", "abc", "--seed", "1234",
                 "generation 15 s, 15 %", "rest of the steps 45 s, 45 %",
                 "outside steps 40 s, 40 %"):  # fmt: skip
        assert text in page.text, text
    tiles = page.text[: page.text.index("Curves")]
    assert "objective/score3from 0.1" in tiles and "objective/kl6from 0.2" in tiles
    changed = page.text[page.text.index("not at its default") : page.text.index("all 2 flags")]
    assert "--seed" in changed and "--kl_coef" not in changed


@pytest.mark.parametrize("num_runs", [1, 2])
def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path, num_runs):
    evil = "</div><script>alert(1)</script><img src=x onerror=alert(1)> & \"quotes' \x00"
    samples = [
        {"step": step, "prompt": f"P {evil}", "answer": f"A {evil} {step}", "score": 1.0} for step in (1, 2)
    ]
    samples.append({"step": 2, "prompt": f"once {evil}", "answer": evil})
    rows = over_steps(12, **PPO)
    rows[0][f"objective/{evil}"] = 1.0
    flags = {"seed": 1, "eot_token": evil, evil: [evil]}
    about = {"defaults": {"eot_token": evil + "x"}, "starts": [{"device": evil, "versions": {evil: evil}}]}
    folders = [
        write_run(tmp_path / f"<i>{n}", rows, samples, flags | {"seed": n}, about) for n in range(num_runs)
    ]
    text = build_page([read_run(folder) for folder in folders], [evil])
    page = Page(text)
    assert page.names() <= HARMLESS
    for tag, attributes in page.tags:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "href", "style")
        ], tag
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    assert page.text.count("<script>alert(1)</script>") >= 6, "shown as it is"


def test_what_changed_in_the_answer_to_a_prompt_is_marked(tmp_path):
    samples = [
        {"step": 1, "prompt": "Hi?", "answer": "I am very fine today"},
        {"step": 5, "prompt": "Hi?", "answer": "I am so fine today"},
        {"step": 9, "prompt": "Hi?", "answer": "I am so fine today"},
    ]
    text = build_page([read_run(write_run(tmp_path, over_steps(9, **PPO), samples))])
    assert "I am <del>very</del><ins>so</ins> fine today" in text
    assert text.count("<ins>") == 2, "one in the explanation" and "(unchanged)" in text


def test_an_answer_is_compared_with_its_runs_own_earlier_one_else_with_the_other_runs():
    answers = [Answer(0, 1, 0, "a"), Answer(0, 1, 1, "b"), Answer(1, 1, 0, "c"), Answer(1, 2, 0, "d")]
    earlier = [find_earlier(answers, i) for i in range(4)]
    assert earlier == [None, None, answers[0], answers[2]]


def test_answers_of_one_step_are_told_apart(tmp_path):
    samples = [{"step": s, "prompt": "p", "answer": a} for s, a in ((1, "x"), (1, "y"), (2, "z"))]
    groups = group_answers([read_run(write_run(tmp_path, over_steps(2, **PPO), samples))])
    assert [(a.step, a.place, a.text) for a in groups["p"]] == [(1, 0, "x"), (1, 1, "y"), (2, 0, "z")]


def test_a_number_that_no_chart_can_hold_is_left_out():
    text = f'{{"step": 1, "a/b": {"9" * 400}, "a/c": 1e999, "a/d": true, "a/e": NaN, "a/f": 1}}'
    assert list(build_curves([json.loads(text)])) == ["a/f"]


def test_numbers_that_were_not_finite_are_counted(tmp_path):
    rows = [{"step": 1, "sft/grad_norm": None}, {"step": 2, "sft/grad_norm": 1.0, "sft/loss": 2.0}]
    page = page_of(write_run(tmp_path, rows))
    assert "1 × not finite" in page.text


def test_several_runs_lie_over_one_another(tmp_path):
    first = write_run(
        tmp_path / "a", over_steps(20, **PPO), flags={"seed": 1, "kl_coef": 0.1, "output_dir": "a"}
    )
    second = write_run(
        tmp_path / "b", over_steps(20, **PPO), flags={"seed": 2, "kl_coef": 0.1, "output_dir": "b"}
    )
    runs = [read_run(first), read_run(second)]
    assert differing_flags(runs) == {"seed": [1, 2]}
    page = page_of(first, second)
    score = page.text.index("objective/score", page.text.index("Curves"))
    assert page.text[score:].startswith("objective/score2 2")
    lines = [a["class"] for t, a in page.tags if t == "path" and (a["class"] or "").startswith("line")]
    assert lines.count("line c0") == lines.count("line c1") > 0


def test_the_steps_of_a_pipeline_beside_one_another(tmp_path):
    sft = write_run(tmp_path / "step1", over_steps(20, sft__loss=lambda s: 3.0))
    ppo = write_run(tmp_path / "step3", over_steps(20, **PPO))
    text = page_of(sft, ppo).text
    signs = text[text.index("Signs of reward hacking") : text.index("what is looked for")]
    assert "step3: none of the" in signs and "step1" not in signs


def test_a_run_of_dpo(tmp_path):
    numbers = {"dpo__loss": lambda s: 0.7 - s / 100, "dpo__margin": lambda s: s / 10}
    text = page_of(write_run(tmp_path, over_steps(20, **numbers))).text
    assert "Step 2, DPO · 20 steps" in text and "dpo/loss0.5from 0.69" in text
    assert text.index("Curves") < text.index("dpo/margin", text.index("Curves"))
    assert "more of dpo/" not in text


def test_flags_that_differ_from_their_defaults(tmp_path):
    flags, defaults = {"a": 1, "b": [2], "resolved_dtype": "fp32"}, {"a": 1, "b": [], "c": 0}
    run = read_run(write_run(tmp_path, [], flags=flags, about={"defaults": defaults}))
    assert changed_flags(run) == {"b": ([2], [])}


def test_phases_are_all_of_the_clock(tmp_path):
    of_step = {"step": 3.0, "actor_update": 1.5, "generate": 1.0, "of_my_own": 0.25, "rest": 0.25}
    rows = over_steps(4, **{f"perf__{name}_seconds": lambda s, v=v: v for name, v in of_step.items()})
    rows[2]["perf/save_seconds"] = 2.0
    rows[3]["seconds"] = 20.0
    phases = find_phases(read_run(write_run(tmp_path, rows)))
    assert phases == [
        ("generation", 4.0), ("update of the actor", 6.0), ("rest of the steps", 1.0), ("checkpoints", 2.0),
        ("of my own", 1.0), ("outside steps", 6.0),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------


def test_data_and_models_are_told(tmp_path):
    data = {"num_train": 400, "num_eval": 100, "num_raw_rows": 512, "num_tokens": 9000, "num_truncated": 25}
    start = {"data": data, "global_rows": 16, "parameters": {"actor": {"all": 1200, "trained": 80}}}
    speed = {"perf__tokens_per_second": lambda s: 50.0, "perf__step_seconds": lambda s: 2.0}
    metrics = over_steps(50, sft__loss=lambda s: 1.0, **speed)
    page = build_page([read_run(write_run(tmp_path / "run", metrics, about={"starts": [start]}))])
    text = Page(page).text
    for told in (
        "rows to train on400 of 512 raw rows", "rows held out100", "tokens of these rows9,000",
        "truncated25, 5.0 %", "passes over the rows2.00", "tokens seen in training5,000",
        "parameters of the actor1,200, 80 trained",
    ):  # fmt: skip
        assert told in text, told
    start["data"] = {"num_train": "many", "num_eval": None}
    start["parameters"] = {"actor": 3}
    build_page([read_run(write_run(tmp_path / "odd", metrics, about={"starts": [start]}))])


def test_the_program_writes_the_page_beside_the_run(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "a", over_steps(3, **PPO))
    main([str(folder)])
    printed = capsys.readouterr()
    assert f"wrote {folder / 'report.html'}" in printed.out and "run.json is missing" in printed.err
    assert "objective/score" in (folder / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    main([str(folder), str(tmp_path / "nothing"), "--output", "both.html"])
    assert "nothing does not exist" in capsys.readouterr().err
    assert "nothing does not exist" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no run is named: give --output_dir of one or several"),
        (["{}/nothing"], "nothing does not exist"),
        (["{}", "--output", "{}"], "is a folder; give a file"),
        (["{}/a", "--output", "{}/none/x.html"], "cannot be written (No such file or directory)"),
        (["{}/a", "--outptu", "x"], "did you mean --output?"),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path, capsys, words, said):
    write_run(tmp_path / "a", over_steps(3, **PPO))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as left:
        main([word.format(tmp_path) for word in words])
    assert left.value.code == 2 and said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_large_run_makes_a_small_page(tmp_path):
    rows = over_steps(20000, **PPO | {f"policy__n{i}": lambda s: math.sin(s) for i in range(10)})
    text = build_page([read_run(write_run(tmp_path, rows))])
    assert len(text) < 400_000


def test_the_page_is_utf_8_with_the_runs_name_as_its_title(tmp_path):
    folder = write_run(tmp_path / "größe", over_steps(2, sft__loss=lambda s: 1.0))
    main([str(folder)])
    text = (folder / "report.html").read_bytes().decode("utf-8")
    assert "<title>größe</title>" in text
