"""The data sets that are known by name: rows in each set's schema, and what the steps make of them."""

from typing import Any, NamedTuple

import pytest
from stage_texts import END, build, put_on_hub, texts

from common.data import hub_data
from common.data.adapters.local_files import AnyForm
from common.data.example import BadRow, EmptyRow
from common.data.registry import load_source
from common.data.source_checks import check_sources
from common.data.stage_datasets import DataOptions

WEATHER = "\n\nHuman: How is the weather?\n\nAssistant:"


class Known(NamedTuple):
    """A row of a data set, and its texts; `rejected` None: no pairs."""

    row: dict[str, Any]
    prompt: str  # as the model reads it
    chosen: str
    rejected: str | None = None


KNOWN = {
    "Dahoas/rm-static": Known(
        {"prompt": WEATHER, "response": " Warm.", "chosen": " Warm.", "rejected": " Go away."},
        WEATHER, " Warm.", " Go away.",
    ),
    "Dahoas/full-hh-rlhf": Known(
        {
            "prompt": f"{WEATHER} Fine.\n\nHuman: And\ntomorrow?\n\nAssistant:",
            "response": " Rain.", "chosen": " Rain.", "rejected": " No idea,\nsorry.",
        },
        f"{WEATHER} Fine.\n\nHuman: And\ntomorrow?\n\nAssistant:", " Rain.", " No idea,\nsorry.",
    ),
    "Dahoas/synthetic-instruct-gptj-pairwise": Known(
        {"prompt": "How is the weather?", "chosen": "Warm.\nVery.", "rejected": "x"},
        WEATHER, " Warm.\nVery.", " x",
    ),
    "yitingxie/rlhf-reward-datasets": Known(
        {
            "prompt": "\n\nHuman: How is the weather?\n\n",
            "chosen": "Assistant: Warm. The Assistant: says so.", "rejected": "\n\nAssistant: Cold.",
        },
        WEATHER, " Warm. The Assistant: says so.", " Cold.",
    ),
    "openai/webgpt_comparisons": Known(
        {
            "question": {"dataset": "eli5", "id": "1", "full_text": "How is the weather?"},
            "quotes_0": {"title": [], "extract": []}, "answer_0": "Cold [1].", "score_0": -0.5,
            "quotes_1": {"title": [], "extract": []}, "answer_1": "Warm [1, 2]. See [a].", "score_1": 0.5,
        },
        WEATHER, " Warm. See [a].", " Cold.",
    ),
    "stanfordnlp/SHP": Known(
        {
            "post_id": "x", "domain": "askculinary_train", "history": "How is the weather?",
            "human_ref_A": "Cold.", "human_ref_B": "Warm.", "labels": 0, "score_A": 3, "score_B": 9,
        },
        WEATHER, " Warm.", " Cold.",
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": Known(
        {
            "prompt": "USER: How is the weather? ASSISTANT: Fine.</s>USER: And\nnow? It says USER ASSISTANT:",
            "label": "Warm.\nVery.</s>",
        },
        f"{WEATHER} Fine.\n\nHuman: And\nnow? It says USER\n\nAssistant:", " Warm.\nVery.",
    ),
    "wangrui6/Zhihu-KOL": Known(
        {"INSTRUCTION": "天气怎么样？", "RESPONSE": "很暖和。\n　明天下雨。", "SOURCE": "Zhihu"},
        "\n\nHuman: 天气怎么样？\n\nAssistant:", " 很暖和。\n　明天下雨。",
    ),
    "Cohere/miracl-zh-queries-22-12": Known(
        {
            "query_id": "0", "query": "天气怎么样？",
            "positive_passages": [{"docid": "1#0", "title": "天气", "text": "很暖和。"}, {"text": "别的"}],
            "negative_passages": [{"docid": "2#0", "title": "鱼", "text": "鱼在水里。"}],
            "emb": [0.1, 0.2],
        },
        "\n\nHuman: 天气怎么样？\n\nAssistant:", " 很暖和。", " 鱼在水里。",
    ),
    "Cohere/miracl-ja-queries-22-12": Known(
        {
            "query_id": "0", "query": "天気はどうですか？",
            "positive_passages": [{"docid": "1#0", "title": "天気", "text": "暖かいです。"}],
            "negative_passages": [{"docid": "2#0", "title": "魚", "text": "魚は泳ぐ。"}],
            "emb": [0.1, 0.2],
        },
        "\n\nHuman: 天気はどうですか？\n\nAssistant:", " 暖かいです。", " 魚は泳ぐ。",
    ),
    "Hello-SimpleAI/HC3-Chinese": Known(
        {
            "id": "0", "question": "天气怎么样？",
            "human_answers": ["很暖和。", "不知道"], "chatgpt_answers": ["作为一个语言模型……"],
        },
        "\n\nHuman: 天气怎么样？\n\nAssistant:", " 很暖和。",
    ),
    "mkqa-Chinese": Known(
        {
            "example_id": "1", "query": "how warm is it",
            "queries": {"en": "how warm is it", "zh_cn": "有多暖和？", "ja": "どのくらい暖かい？"},
            "answers": {
                "en": [{"type": 5, "entity": "", "text": "20 degrees", "aliases": []}],
                "zh_cn": [{"type": 5, "entity": "", "text": "２０度", "aliases": ["20度"]}],
                "ja": [],
            },
        },
        "\n\nHuman: 有多暖和？\n\nAssistant:", " ２０度",
    ),
    "mkqa-Japanese": Known(
        {
            "example_id": "1", "query": "how warm is it",
            "queries": {"en": "how warm is it", "zh_cn": "有多暖和？", "ja": "どのくらい暖かい？"},
            "answers": {"ja": [{"type": 5, "entity": "", "text": "２０度です", "aliases": []}], "zh_cn": []},
        },
        "\n\nHuman: どのくらい暖かい？\n\nAssistant:", " ２０度です",
    ),
    "lmqg/qg_jaquad": Known(
        {
            "question": "天気はどうですか？", "answer": "暖かい", "sentence": "今日は暖かいです。",
            "paragraph": "朝は寒い。今日は暖かいです。", "paragraph_id": "tr-1",
        },
        "\n\nHuman: 天気はどうですか？\n\nAssistant:", " 今日は暖かいです。",
    ),
    "lmqg/qag_jaquad": Known(
        {
            "questions": ["天気はどうですか？", "朝は？"], "answers": ["暖かい", "寒い"],
            "paragraph": "朝は寒い。\n今日は暖かいです。", "questions_answers": "question: ...",
        },
        "\n\nHuman: 天気はどうですか？\n\nAssistant:", " 朝は寒い。\n今日は暖かいです。",
    ),
}  # fmt: skip
WITHOUT_PAIRS = [name for name, known in KNOWN.items() if known.rejected is None]


@pytest.mark.parametrize("name", KNOWN)
def test_texts_of_the_three_steps(monkeypatch, tmp_path, tiny_tokenizer, name):
    known = KNOWN[name]
    put_on_hub(monkeypatch, name, [known.row])
    data = build(name, 1, tiny_tokenizer, tmp_path)
    assert texts(data, 1, tiny_tokenizer) == [(known.prompt, known.chosen + END)]
    data = build(name, 3, tiny_tokenizer, tmp_path)
    assert texts(data, 3, tiny_tokenizer) == [known.prompt]
    if known.rejected is not None:
        data = build(name, 2, tiny_tokenizer, tmp_path)
        expected = (known.prompt, known.chosen + END, known.rejected + END)
        assert texts(data, 2, tiny_tokenizer) == [expected]


@pytest.mark.parametrize("name", WITHOUT_PAIRS)
def test_a_set_without_pairs_is_refused_by_step_2_with_the_way_to_use_it(monkeypatch, name):
    put_on_hub(monkeypatch, name, [KNOWN[name].row])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = check_sources([name], 2, DataOptions([name], 2, data_split="0,1,0"))
    assert problem.startswith(f"--data_path {name}: ")
    assert "no pair of a chosen and a rejected answer; step 1 can use it by --sft_only_data_path" in problem


WRONG = [
    ("pvduy/sharegpt_alpaca_oa_vicuna_format", {"label": 3}, "'label' is of type int, not text"),
    ("wangrui6/Zhihu-KOL", {"RESPONSE": ["a"]}, "the chosen answer.0. has no 'role'"),
    (
        "Cohere/miracl-zh-queries-22-12",
        {"positive_passages": "a"},
        "'positive_passages' is of type str, not a list",
    ),
    (
        "Cohere/miracl-ja-queries-22-12",
        {"negative_passages": ["a"]},
        r"'negative_passages\[0\]' is of type str",
    ),
    ("Cohere/miracl-ja-queries-22-12", {"positive_passages": [{"title": "a"}]}, "has no 'text'"),
    ("Hello-SimpleAI/HC3-Chinese", {"human_answers": "a"}, "'human_answers' is of type str, not a list"),
    ("mkqa-Chinese", {"queries": {"en": "how warm is it"}}, "'queries' has no 'zh_cn'"),
    ("mkqa-Japanese", {"answers": None}, "'answers' is null, not an object"),
    ("mkqa-Japanese", {"answers": {"ja": ["a"]}}, r"'answers.ja\[0\]' is of type str, not an object"),
    ("lmqg/qg_jaquad", {"sentence": 1}, "'the chosen answer' is of type int"),
    ("lmqg/qag_jaquad", {"questions": [1]}, "'prompt' is of type int, not text"),
    ("openai/webgpt_comparisons", {"question": {"id": "1"}}, "'question' has no 'full_text'"),
]


@pytest.mark.parametrize(("name", "change", "reason"), WRONG)
def test_a_wrong_field_is_a_bad_row(name, change, reason):
    with pytest.raises(BadRow, match=reason) as raised:
        load_source(name).adapter.to_examples(KNOWN[name].row | change)
    assert not isinstance(raised.value, EmptyRow)


@pytest.mark.parametrize(
    "name", [name for name in KNOWN if not isinstance(load_source(name).adapter, AnyForm)]
)
def test_every_column_that_is_needed_is_named_when_it_is_missing(name):
    adapter = load_source(name).adapter
    assert adapter.columns()
    for column in adapter.columns():
        row = {key: value for key, value in KNOWN[name].row.items() if key != column}
        with pytest.raises(BadRow, match=f"no column '{column}'; found"):
            adapter.to_examples(row)


GAPS = [  # what the row lacks, and the steps that can still use it
    ("wangrui6/Zhihu-KOL", {"INSTRUCTION": None}, ()),
    ("wangrui6/Zhihu-KOL", {"INSTRUCTION": " \n"}, ()),
    ("wangrui6/Zhihu-KOL", {"RESPONSE": None}, (3,)),
    ("wangrui6/Zhihu-KOL", {"RESPONSE": ""}, (3,)),
    ("pvduy/sharegpt_alpaca_oa_vicuna_format", {"label": None}, ()),
    ("pvduy/sharegpt_alpaca_oa_vicuna_format", {"label": "</s>"}, ()),
    ("Cohere/miracl-ja-queries-22-12", {"negative_passages": []}, (1, 3)),
    ("Cohere/miracl-ja-queries-22-12", {"positive_passages": None}, (3,)),
    ("Hello-SimpleAI/HC3-Chinese", {"human_answers": []}, (3,)),
    ("Hello-SimpleAI/HC3-Chinese", {"human_answers": [None]}, (3,)),
    ("mkqa-Chinese", {"answers": {"zh_cn": [{"type": 8, "text": None}]}}, (3,)),
    ("mkqa-Chinese", {"answers": {"zh_cn": []}}, (3,)),
    ("mkqa-Japanese", {"queries": {"ja": None}}, ()),
    ("lmqg/qag_jaquad", {"questions": []}, ()),
]


@pytest.mark.parametrize(("name", "change", "steps"), GAPS)
def test_a_row_with_a_gap_is_left_out_of_the_steps_that_need_the_text(
    monkeypatch, tmp_path, tiny_tokenizer, name, change, steps
):
    good = KNOWN[name].row
    put_on_hub(monkeypatch, name, [good, good | change])
    for step in (1, 2, 3) if KNOWN[name].rejected else (1, 3):
        data = build(name, step, tiny_tokenizer, tmp_path, max_bad_rows=0)
        assert (len(data.train), data.report.num_empty) == ((2, 0) if step in steps else (1, 1)), step


def test_vicuna_text_without_marks_and_with_a_preface():
    adapter = load_source("pvduy/sharegpt_alpaca_oa_vicuna_format").adapter
    (bare,) = adapter.to_examples({"prompt": "How warm?", "label": "20"})
    assert [tuple(message) for message in bare.prompt] == [("user", "How warm?")]
    (example,) = adapter.to_examples({"prompt": "Be kind. USER: Hi ASSISTANT:", "label": "Hello"})
    assert [tuple(message) for message in example.prompt] == [("system", "Be kind."), ("user", "Hi")]


# ---- places on the hub


class FakeSplit(list):
    _fingerprint = "f"

    def with_format(self, _):
        return self


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("mkqa-Chinese", ("apple/mkqa", None)),
        ("mkqa-Japanese", ("apple/mkqa", None)),
        ("Hello-SimpleAI/HC3-Chinese", ("Hello-SimpleAI/HC3-Chinese", "all")),
        ("nvidia/HelpSteer3", ("nvidia/HelpSteer3", "preference")),
        ("stanfordnlp/SHP", ("stanfordnlp/SHP", None)),
    ],
)
def test_where_a_name_lies(monkeypatch, name, asked):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*given):
        calls.append(given)
        return {"train": FakeSplit([{"a": 1}]), "test": FakeSplit([{}]), "validation": FakeSplit([{}, {}])}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train, held_out = hub_data.load_hub(name, load_source(name).adapter.hub_places.get(name))
    assert calls == [asked]
    assert (len(train), len(held_out)) == (1, 2)  # validation before test


def test_splits_by_other_names(monkeypatch):
    datasets = pytest.importorskip("datasets")
    name = "HuggingFaceH4/ultrafeedback_binarized"
    splits = {"train_sft": [1, 2, 3], "train_prefs": [1], "test_sft": [1, 2, 3, 4], "test_prefs": [1, 2]}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: {key: FakeSplit(value) for key, value in splits.items()}
    )
    train, held_out = hub_data.load_hub(name, load_source(name).adapter.hub_places[name])
    assert (len(train), len(held_out)) == (1, 2)


def test_a_set_that_is_a_program_is_read_from_the_hubs_copy(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*given, **more):
        calls.append((given, more))
        if not more:
            raise RuntimeError("Dataset scripts are no longer supported, but found qg_jaquad.py")
        return {"train": FakeSplit([{"question": "q"}])}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    name = "lmqg/qg_jaquad"
    train, held_out = hub_data.load_hub(name, load_source(name).adapter.hub_places[name])
    assert (len(train), held_out) == (1, None)
    assert calls[1] == ((name,), {"data_dir": "qg_jaquad", "revision": "refs/convert/parquet"})
