"""Several answers to a prompt: ranked, scored, two with a preference; conversations and message lists."""

import pytest
from stage_texts import END, build, make_options, put_on_hub, texts, write_rows

from common.data.adapters.row_forms import rank_by_score, read_row
from common.data.data_options import check_sources
from common.data.example import BadRow, EmptyRow, Message, missing_for
from common.data.registry import load_source

HI = (Message("user", "hi"),)
TURNS = (*HI, Message("assistant", "hello"), Message("user", "and?"))
LIST = [message.as_dict() for message in TURNS]
SHAREGPT = [
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "hello"},
    {"from": "human", "value": "and?"},
]


def pairs(examples):
    return [(e.chosen, e.rejected, e.is_tie, e.for_pairs_only) for e in examples]


# ---- pairs of several answers


def test_all_pairs_of_scored_answers_by_hand():
    found = rank_by_score(HI, ["poor", "best", "fair", "also fair"], [1.0, 4.0, 2.0, 2.0])
    assert pairs(found) == [
        ("best", "fair", False, False),
        ("best", "also fair", False, False),
        ("best", "poor", False, False),
        ("fair", "also fair", True, True),
        ("fair", "poor", False, True),
        ("also fair", "poor", False, True),
    ]
    assert [e.margin for e in found] == [2.0, 2.0, 3.0, 0.0, 1.0, 1.0]
    with pytest.raises(BadRow, match="'margin' is inf, not a number"):
        rank_by_score(HI, ["a", "b"], [1e308, -1e308])


ABC = [("a", "b", False, False), ("a", "c", False, False), ("b", "c", False, True)]
SCORED_TEXTS = [{"text": "c", "score": 0}, {"text": "a", "score": 9}, {"text": "b", "score": 1}]


RANKED_TEXTS = [{"answer": "c", "rank": 3}, {"answer": "a", "rank": 1}, {"answer": "b", "rank": 2}]


@pytest.mark.parametrize(
    ("row", "margins"),
    [
        ({"prompt": "hi", "ranked_answers": ["a", "b", "c"]}, [0, 0, 0]),
        ({"prompt": "hi", "responses": ["c", "a", "b"], "scores": [-1, 2.5, 0]}, [2.5, 3.5, 1]),
        ({"prompt": "hi", "responses": ["c", "a", "b"], "ranks": [3, 1, 2]}, [0, 0, 0]),
        ({"prompt": "\n\nHuman: hi\n\nAssistant: ", "answers": SCORED_TEXTS}, [8, 9, 1]),
        ({"prompt": "hi", "answers": RANKED_TEXTS}, [0, 0, 0]),
        ({"prompt": "hi", "completions": RANKED_TEXTS}, [0, 0, 0]),
    ],
)
def test_every_form_of_a_ranking(row, margins):
    """Places in an order say nothing of how far apart two answers are: they give no margin."""
    found = read_row(row)
    assert pairs(found) == ABC and {e.prompt for e in found} == {HI}
    assert [e.margin for e in found] == margins


def test_answers_that_a_reward_compares_with_are_no_ranking():
    (example,) = read_row({"prompt": "2 + 2?", "answers": ["4", "four"]})
    assert (example.prompt, example.chosen) == ((Message("user", "2 + 2?"),), None)


def test_pairs_of_seven_answers_stay_within_the_limit_and_step_1_learns_the_best(tmp_path, tiny_tokenizer):
    rows = [{"prompt": f"q{n}", "ranked_answers": [f"{n}{letter}" for letter in "abcdefg"]} for n in (1, 2)]
    path = write_rows(tmp_path / "ranked.jsonl", rows)
    data = build(path, 2, tiny_tokenizer, tmp_path, max_pairs_per_prompt=4, num_stored_epochs=1)
    assert (len(data.train), data.report.num_dropped_pairs) == (8, 34)  # of 2 * 7 * 6 / 2
    assert data.train.numbers("prompt_index").tolist() == [0] * 4 + [1] * 4
    for prompt, chosen, rejected in texts(data, 2, tiny_tokenizer):
        number = prompt.split("q")[1][0]
        assert chosen[1] == rejected[1] == number and chosen < rejected
    data = build(path, 1, tiny_tokenizer, tmp_path)
    assert [learnt for _, learnt in texts(data, 1, tiny_tokenizer)] == [f" 1a{END}", f" 2a{END}"]
    assert len(build(path, 3, tiny_tokenizer, tmp_path).train) == 2


def test_an_empty_ranking_is_empty_and_one_answer_is_no_pair():
    with pytest.raises(EmptyRow):
        read_row({"prompt": "hi", "ranked_answers": []})
    (example,) = read_row({"prompt": "hi", "ranked_answers": ["a"]})
    assert (example.chosen, example.rejected) == ("a", None)
    assert str(example.absence) == "its prompt has one answer only"


# ---- two responses with a preference


@pytest.mark.parametrize(("preference", "is_tie"), [(-3, False), (0, True)])
def test_helpsteer3(preference, is_tie):
    answers = {"response1": "one", "response2": "two", "overall_preference": preference}
    (example,) = read_row({"context": LIST} | answers)
    assert pairs([example]) == [("one", "two", is_tie, False)]
    assert (example.prompt, example.margin) == (TURNS, abs(preference))


# ---- a row for every response


def scored(prompt, response, helpfulness, correctness=0):
    scores = {"helpfulness": helpfulness, "correctness": correctness, "coherence": 4}
    return {"prompt": prompt, "response": response} | scores


HELPSTEER2 = [
    scored("hi", "first", 1, 4),
    scored("hi", "second", 3, 2),
    scored("a\n\n<extra_id_1>Assistant\nb\n\n<extra_id_1>User\nc", "third", 2, 1),
    scored("a\n\n<extra_id_1>Assistant\nb\n\n<extra_id_1>User\nc", "fourth", 2, 3),
]
HI_TEXT = "\n\nHuman: hi\n\nAssistant:"
ABC_TEXT = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def test_rows_of_one_prompt_make_a_pair_by_the_chosen_column(monkeypatch, tmp_path, tiny_tokenizer):
    source = "nvidia/HelpSteer2"
    put_on_hub(monkeypatch, source, HELPSTEER2)
    data = build(source, 2, tiny_tokenizer, tmp_path)
    assert texts(data, 2, tiny_tokenizer) == [(HI_TEXT, f" second{END}", f" first{END}")]
    assert (data.report.num_ties, data.report.num_raw_rows, data.train[0]["margin"]) == (1, 2, 2.0)
    data = build(source, 2, tiny_tokenizer, tmp_path, score_column="correctness")
    expected = [(HI_TEXT, f" first{END}", f" second{END}"), (ABC_TEXT, f" fourth{END}", f" third{END}")]
    assert texts(data, 2, tiny_tokenizer) == expected
    data = build(source, 1, tiny_tokenizer, tmp_path)
    assert texts(data, 1, tiny_tokenizer) == [(HI_TEXT, f" second{END}"), (ABC_TEXT, f" third{END}")]


def test_rows_of_one_prompt_need_not_be_neighbours_and_keep_their_place(tmp_path):
    rows = [HELPSTEER2[0], HELPSTEER2[2] | {"id": "own"}, HELPSTEER2[1]]
    train = load_source(write_rows(tmp_path / "scored.jsonl", rows)).train
    assert [len(train[i]["responses"]) for i in range(len(train))] == [2, 1]
    assert [train.row_id(i, train[i]) for i in (0, 1)] == ["scored.jsonl:1", "own"]


def test_a_response_without_a_score_is_a_bad_row_and_harms_no_other_prompt(tmp_path, tiny_tokenizer):
    without = {key: value for key, value in scored("x", "y", 1).items() if key != "helpfulness"}
    rows = [*HELPSTEER2, without, scored("z", "w", "none"), scored("z", "v", 1)]
    path = write_rows(tmp_path / "scored.jsonl", [*rows, "{no json"])
    data = build(path, 2, tiny_tokenizer, tmp_path)
    assert (len(data.train), data.report.num_bad, data.report.num_ties) == (1, 3, 1)
    reasons = " ".join(data.report.bad_rows)
    assert "scored.jsonl:5: no column 'helpfulness'; --score_column names another" in reasons
    assert "'helpfulness' is 'none', not a number" in reasons
    assert "scored.jsonl:8: the line is not JSON" in reasons


def test_a_score_column_that_a_plain_file_lacks_is_said(tmp_path, tiny_tokenizer):
    path = write_rows(tmp_path / "plain.jsonl", [{"prompt": "hi", "response": "hello"}])
    report = build(path, 1, tiny_tokenizer, tmp_path, score_column="quality").report
    told = "no column 'quality' (--score_column): read as prompt/response"
    assert any(told in line for line in report.lines())
    assert not build(path, 1, tiny_tokenizer, tmp_path).report.notes


# ---- chosen and rejected as message lists


def replied(turns, reply):
    return [*turns, {"role": "assistant", "content": reply}]


A, B = replied(LIST, "a"), replied(LIST, "b")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "prompt_id": "x", "chosen": A, "rejected": B, "score_chosen": 8},
        {"prompt": " and? ", "chosen": A, "rejected": B},
        {"prompt": LIST, "chosen": replied([], "a"), "rejected": "b"},
        {"conversations": SHAREGPT, "chosen": {"from": "gpt", "value": "a"}, "rejected": replied([], "b")},
    ],
)
def test_pairs_of_many_turns_keep_all_of_them(row):
    (example,) = read_row(row)
    assert (example.prompt, example.chosen, example.rejected, example.is_tie) == (TURNS, "a", "b", False)


def test_equal_scores_of_a_pair_are_a_tie(tmp_path, tiny_tokenizer):
    row = {"prompt": "hi", "chosen": A, "rejected": B, "score_rejected": 6.0}
    rows = [row | {"score_chosen": 6.0}, row | {"score_chosen": 7.0}]
    data = build(write_rows(tmp_path / "rows.jsonl", rows), 2, tiny_tokenizer, tmp_path)
    assert (len(data.train), data.report.num_ties) == (1, 1)


# ---- conversations


def test_sharegpt(tmp_path, tiny_tokenizer):
    rows = [
        {"id": "a", "conversations": [*SHAREGPT, {"from": "gpt", "value": "２０度\nです"}]},
        {"conversations": [{"from": "system", "value": "Be kind."}, *SHAREGPT]},
    ]
    (first,), (second,) = map(read_row, rows)
    assert (first.prompt, first.chosen, first.learn_all_turns) == (TURNS, "２０度\nです", True)
    assert (second.prompt, second.chosen) == ((Message("system", "Be kind."), *HI), "hello")
    path = write_rows(tmp_path / "chats.jsonl", rows[:1])
    ((_, learnt),) = texts(build(path, 1, tiny_tokenizer, tmp_path), 1, tiny_tokenizer)
    assert learnt == f" hello{END} ２０度\nです{END}"


# ---- rated answers, each by itself


UPS = (True, 1, 1.0, "1", "True", "up", "THUMBS_UP", "👍", " true ", "yes", "Good", "thumbs up", "1.00")
DOWNS = (False, 0, -1, "0.0", "down", "👎", "False ", "no", "bad", "thumbs-down", "0.00", -0.0)


@pytest.mark.parametrize("column", ["completion", "response"])
def test_a_label_says_whether_an_answer_is_good(column):
    for labels, is_good in ((UPS, True), (DOWNS, False)):
        for label in labels:
            (example,) = read_row({"prompt": "hi", column: "a", "label": label})
            expected = ("a", None) if is_good else (None, "a")
            assert ((example.chosen, example.rejected), example.is_rated) == (expected, True), label
            assert (missing_for(1, example) is None) == is_good and missing_for(3, example) is None
            assert missing_for(2, example, is_unpaired=True) is None
            assert "use --loss kto" in str(missing_for(2, example))
    assert isinstance(missing_for(1, example), EmptyRow)


def test_a_label_that_is_no_thumb_is_for_a_reward():
    for label in ("sports", "", 0.5, 2, [True], {"a": 1}, "1_0", float("nan")):
        (example,) = read_row({"prompt": "hi", "response": "a", "label": label})
        assert (example.chosen, example.rejected, example.is_rated) == (None, None, False)
        for step in (1, 2):
            problem = missing_for(step, example, is_unpaired=True)
            assert "is neither good nor bad" in str(problem) and not isinstance(problem, EmptyRow)
        assert missing_for(3, example) is None


def rated_texts(data, tokenizer):
    """(answer, label) of each row; its prompt stands before it."""
    found = []
    for row in (data.train[i] for i in range(len(data.train))):
        start = row["answer_response_start"]
        assert tokenizer.decode(row["answer_ids"][:start]) == HI_TEXT
        found.append((tokenizer.decode(row["answer_ids"][start:]).removesuffix(END).strip(), row["label"]))
    return found


def test_labels_and_pairs_become_rated_answers(tmp_path, tiny_tokenizer):
    rows = [
        {"prompt": "hi", "completion": "up", "label": 1},
        {"prompt": "hi", "completion": "down", "label": False},
        {"prompt": "hi", "chosen": "good", "rejected": "bad"},
        {"prompt": "hi", "responses": ["worst", "best", "low", "high"], "scores": [0, 9, 1, 1]},
        {"prompt": "hi", "ranked_answers": ["first", "middle", "last"]},
        {"prompt": "hi", "answer": "not rated"},
        {"prompt": "hi", "responses": ["a", "b"], "scores": [1, 1]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = build(path, 2, tiny_tokenizer, tmp_path, is_unpaired=True, max_pairs_per_prompt=1)
    # "low" and "high" tie, and each wins and loses once besides, as "middle" does: they say nothing.
    good, bad = ("up", "good", "best", "first"), ("down", "bad", "worst", "last")
    found = rated_texts(data, tiny_tokenizer)
    assert len(found) == 8 and set(found) == {(a, 1) for a in good} | {(a, 0) for a in bad}
    report = data.report
    assert (report.num_good_answers, report.num_bad_answers, report.num_ties, report.num_bad) == (4, 4, 2, 1)
    assert "rated data: 4 answers are good, by their label or their pairs" in report.lines()
    pairs_alone = build(path, 2, tiny_tokenizer, tmp_path)
    assert pairs_alone.report.num_bad == 3 and len(pairs_alone.train) == 1 + 5 + 3


def test_a_source_without_labels_and_pairs_is_refused_with_the_forms(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "hi", "answer": "a"}])
    options = make_options(path, 2, tmp_path, is_unpaired=True)
    (problem,) = check_sources(options)
    assert "no pair of a chosen" in problem and "| prompt/response/label |" in problem
    (problem,) = check_sources(make_options(path, 2, tmp_path))
    assert "/label" not in problem
