"""The demo's inputs and measures, against values worked out by hand."""

import argparse
import json
import math

import pytest
import torch
from made_runs import write_run
from transformers import LlamaConfig, LlamaForCausalLM

from common.data.dialogue import build_template
from training_scripts.demo import build_inputs, measure
from training_scripts.demo.aims import SUMMARY_KEYS, format_summary, missed_aims
from training_scripts.demo.preference_pairs import length_rule_accuracy, pair_by_sentiment
from training_scripts.demo.text_measures import (
    distinct_n,
    kl_per_reply,
    mean_words,
    response_mask_until_end,
    unigram_perplexity,
)
from training_scripts.demo.turns import Turn, context_of, format_prompt

TURNS = [
    Turn("How are you?", "I'm fine, thanks! And YOU?"),
    Turn("What do you do?", "I study math"),
    Turn("Nice.", "yeah it is nice"),
    Turn("Where do you live?", "in a small town"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_inputs.build_tokenizer(TURNS, vocab_size=300)


@pytest.fixture(scope="module")
def template(tokenizer):
    return build_template("human_assistant", tokenizer)


def tiny_model(tokenizer, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,  # far from uniform: a wrong position or a wrong shift shows
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


# --- texts


def test_distinct_2_counts_pairs_of_words_over_all_texts():
    # (i, am) (am, i) (i, am) | (i, am) (am, fine): 5 pairs, 3 different
    assert distinct_n(["I am i am", "i am fine"]) == pytest.approx(3 / 5)


def test_distinct_2_does_not_join_texts_and_takes_one_word_as_none():
    assert distinct_n(["a", "b a", "", "b"]) == 1.0
    assert distinct_n(["a", "b"]) == 0.0


def test_distinct_1():
    assert distinct_n(["a b", "a a"], n=1) == pytest.approx(2 / 4)


def test_mean_words_counts_an_empty_reply():
    assert mean_words(["one two  three", "", "so, what?"]) == pytest.approx(5 / 3)


def test_unigram_perplexity_by_hand():
    # train counts 0: 3, 1: 1, add one over 4 tokens: p(0) = 4/8, p(1) = 2/8, p(2) = p(3) = 1/8
    value = unigram_perplexity([[0, 0, 1], [0]], [[0, 1], [3]], vocab_size=4)
    assert value == pytest.approx((0.5 * 0.25 * 0.125) ** (-1 / 3))


def test_unigram_perplexity_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no held-out token"):
        unigram_perplexity([[0]], [], vocab_size=2)


# --- samples


def test_the_end_token_counts_and_what_follows_does_not():
    ids = torch.tensor([[5, 1, 1, 5], [5, 6, 7, 8], [1, 5, 5, 1]])
    expected = [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert response_mask_until_end(ids, end_id=1).tolist() == expected


def test_kl_sums_over_a_reply_and_never_reads_beyond_it():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -0.25, -1.0]])
    ref_logprobs = torch.tensor([[-1.5, -4.0, 0.0], [-0.25, -1.25, -3.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    torch.testing.assert_close(kl_per_reply(logprobs, ref_logprobs, mask), torch.tensor([2.5, 2.75]))


def sum_of_logprobs(model, prompt, reply):
    """The plain loop: one unpadded forward pass a token, in float64."""
    total = 0.0
    for position in range(len(reply)):
        logits = model(torch.tensor([prompt + reply[:position]])).logits[0, -1].double()
        total += logits.log_softmax(-1)[reply[position]].item()
    return total


def test_mean_kl_on_padded_samples_equals_a_plain_loop(tokenizer):
    model, ref_model = tiny_model(tokenizer, seed=0), tiny_model(tokenizer, seed=1)
    prompts = tokenizer([format_prompt(turn.context) for turn in TURNS])["input_ids"]
    samples = measure.sample_replies(model, tokenizer, prompts, max_response_tokens=6, batch_size=3, seed=3)
    expected = []
    for row, prompt in enumerate(prompts):
        batch, place = samples.batches[row // 3], row % 3
        reply = batch.response_ids[place][batch.response_mask[place]].tolist()
        expected.append(sum_of_logprobs(model, prompt, reply) - sum_of_logprobs(ref_model, prompt, reply))
    kl = measure.mean_kl(model, ref_model, samples.batches)
    assert kl == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    assert measure.mean_kl(model, model, samples.batches) == 0.0


def test_samples_end_at_the_end_token_and_repeat_by_seed(tokenizer):
    model = tiny_model(tokenizer, seed=0)
    prompts = tokenizer([format_prompt(turn.context) for turn in TURNS])["input_ids"]
    options = {"max_response_tokens": 8, "batch_size": 4}
    with torch.no_grad():
        # With the end token as likely as half of all others together, most replies end early.
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    first = measure.sample_replies(model, tokenizer, prompts, seed=3, **options)
    again = measure.sample_replies(model, tokenizer, prompts, seed=3, **options)
    assert first.texts == again.texts and len(first.texts) == len(prompts)
    assert first.texts != measure.sample_replies(model, tokenizer, prompts, seed=4, **options).texts
    ends = [
        int(tokenizer.eos_token_id in ids[mask].tolist())
        for batch in first.batches
        for ids, mask in zip(batch.response_ids, batch.response_mask, strict=True)
    ]
    assert first.finished_fraction == sum(ends) / len(ends)


def test_model_perplexity_equals_a_plain_loop_over_response_tokens(tokenizer, template):
    model = tiny_model(tokenizer, seed=0)
    rows = measure.scored_rows(TURNS, template)
    total, count = 0.0, 0
    for turn in TURNS:
        prompt = tokenizer(format_prompt(turn.context))["input_ids"]
        reply = tokenizer(f" {turn.reply}{tokenizer.eos_token}")["input_ids"]
        total -= sum_of_logprobs(model, prompt, reply)
        count += len(reply)
    assert measure.model_perplexity(model, rows, batch_size=3) == pytest.approx(
        math.exp(total / count), rel=1e-5
    )
    assert sum(map(len, measure.response_rows(rows))) == count


# --- inputs


def test_a_prompt_is_the_template_s_own(template):
    from common.data.example import Message

    text = template.prompt_text((Message("user", "How are you?"),))
    assert format_prompt("How are you?") == text
    assert context_of(text) == "How are you?"
    with pytest.raises(ValueError, match="no prompt of build_inputs"):
        context_of("How are you?")


def test_tokenizer_keeps_text_has_one_token_markers_and_an_end(tokenizer):
    text = f"{format_prompt('Héllo  THERE, ok?')} I'm  fine 👍{tokenizer.eos_token}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id is None
    assert ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
    marker = tokenizer("\n\nAssistant:")["input_ids"]
    assert len(marker) == 1 and marker[0] in ids


def test_a_pair_is_labelled_by_score_and_matched_by_length():
    scores = [0.9, 0.0, 0.5, 0.45, -0.6, 0.7]
    lengths = [3, 3, 8, 8, 8, 20]  # only 0-1, 2-4 and 3-4 have like lengths and a sufficient gap
    pairs = pair_by_sentiment(scores, lengths, min_gap=0.4, length_tolerance=0, seed=0)
    assert (0, 1) in {(pair.chosen, pair.rejected) for pair in pairs}
    assert {(pair.chosen, pair.rejected) for pair in pairs} - {(0, 1)} <= {(2, 4), (3, 4)}
    assert len(pairs) == 2
    assert all(pair.prompt in (pair.chosen, pair.rejected) for pair in pairs)
    assert pairs == pair_by_sentiment(scores, lengths, min_gap=0.4, length_tolerance=0, seed=0)


def test_many_pairs_keep_gap_and_tolerance_use_a_reply_once_and_a_fair_coin_for_the_prompt():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (3000,), generator=generator).tolist()
    scores = (torch.rand(3000, generator=generator) * 2 - 1).tolist()
    pairs = pair_by_sentiment(scores, lengths, min_gap=0.4, length_tolerance=2, seed=0)
    used = [index for pair in pairs for index in (pair.chosen, pair.rejected)]
    assert len(set(used)) == len(used) > 2400
    assert all(scores[pair.chosen] - scores[pair.rejected] >= 0.4 for pair in pairs)
    assert max(abs(lengths[pair.chosen] - lengths[pair.rejected]) for pair in pairs) == 2
    longer, shorter = length_rule_accuracy(
        [lengths[pair.chosen] for pair in pairs], [lengths[pair.rejected] for pair in pairs]
    )
    assert longer == pytest.approx(0.5, abs=0.04) and longer + shorter == 1.0
    assert sum(pair.prompt == pair.chosen for pair in pairs) / len(pairs) == pytest.approx(0.5, abs=0.05)
    assert len(pair_by_sentiment(scores, lengths, min_gap=0.4, length_tolerance=2, seed=0, max_pairs=7)) == 7


def test_pair_flags_are_checked():
    with pytest.raises(ValueError, match="--min_gap 0"):
        pair_by_sentiment([0.0], [1], min_gap=0, length_tolerance=0, seed=0)
    with pytest.raises(ValueError, match="--length_tolerance -1"):
        pair_by_sentiment([0.0], [1], min_gap=0.1, length_tolerance=-1, seed=0)


def test_length_rule_accuracy_by_hand():
    # longer, shorter, tie, longer: 1 + 0 + 1/2 + 1 of 4
    assert length_rule_accuracy([3, 1, 2, 9], [1, 3, 2, 8]) == (0.625, 0.375)
    with pytest.raises(ValueError, match="no pairs"):
        length_rule_accuracy([], [])


def test_turns_keep_the_limits_and_are_distinct():
    talk = ("hi", "hello there", "one two three four", "ok", "hi", "hello there")
    turns = build_inputs.turns_of([talk], max_context_words=2, max_reply_words=3)
    assert turns == [Turn("hi", "hello there"), Turn("ok", "hi")]


@pytest.fixture(scope="module")
def small_inputs(tmp_path_factory):
    def build(name):
        folder = tmp_path_factory.mktemp(name)
        build_inputs.write_inputs(build_inputs.parse_args([str(folder), *SMALL_FLAGS]))
        return folder

    return build


SMALL_FLAGS = (
    "--max_context_words 5 --max_reply_words 4 --num_train_pairs 60 --num_eval_pairs 20 --vocab_size 300 "
    "--hidden_size 16 --intermediate_size 16 --num_layers 1 --num_heads 2"
).split()


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_inputs_are_the_same_for_one_seed_and_share_no_turn(small_inputs):
    first, again = small_inputs("first"), small_inputs("again")
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    expected = [f"{kind}/{part}.jsonl" for kind in ("pairs", "prompts", "sft") for part in ("eval", "train")]
    assert [name for name in names if name.endswith(".jsonl")] == expected
    assert {"base/config.json", "base/model.safetensors", "base/tokenizer.json"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    pairs = read_rows(first / "pairs" / "train.jsonl")
    assert 40 <= len(pairs) <= 60 and set(pairs[0]) == {"prompt", "chosen", "rejected"}
    analyzer = build_inputs.SentimentIntensityAnalyzer()
    for row in pairs:
        scores = [analyzer.polarity_scores(row[key])["compound"] for key in ("chosen", "rejected")]
        assert scores[0] - scores[1] >= 0.4
    assert set(read_rows(first / "prompts" / "eval.jsonl")[0]) == {"prompt"}
    turns = measure.load_turns(first / "sft" / "eval.jsonl")
    assert all(len(turn.context.split()) <= 5 and len(turn.reply.split()) <= 4 for turn in turns)


def test_a_bad_row_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "eval.jsonl"
    good = json.dumps({"prompt": format_prompt("hi"), "answer": "hello"})
    path.write_text(f'{good}\n{{"prompt": "hi"}}\n', encoding="utf-8")
    assert measure.load_turns(path, limit=1) == [Turn("hi", "hello")]
    with pytest.raises(ValueError, match=r"eval.jsonl:2: no row of build_inputs.py"):
        measure.load_turns(path)


# --- the summary


def good_summary():
    values = (300, 1.0, 400, 60, 0.9, -0.5, 0.5, 1.0, 0.7, 0.2, 0.5, 5.0, 0.9, 0.8, 8.0, 7.0)
    return dict(zip(SUMMARY_KEYS, values, strict=True))


def test_the_table_says_met_and_missed():
    lines = format_summary(good_summary())
    assert len(lines) == len(SUMMARY_KEYS)
    assert sum(" met " in line for line in lines) == 9 and missed_aims(good_summary()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sft_perplexity", 201),
        ("reward_accuracy", 0.849),
        ("win_rate", 0.59),
        ("vader_ppo", 0.449),
        ("kl", 10.0),
        ("distinct2_ppo", 0.449),
        ("words_ppo", 4.79),
        ("seconds", 481),
        ("peak_gib", 4.01),
        ("kl", math.nan),
    ],
)
def test_each_aim_can_be_missed(key, value):
    assert missed_aims({**good_summary(), key: value}) == [key]


def test_a_summary_with_another_key_is_refused():
    with pytest.raises(ValueError, match="keys"):
        format_summary({**good_summary(), "extra": 1.0})


def test_the_last_json_line_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"accuracy": 0.5}\nnoise\n{not json\n{"accuracy": 0.9, "margin": 1}\n{"other": 1}\n')
    assert measure.read_last_json(path, "accuracy") == 0.9
    with pytest.raises(ValueError, match="no JSON line with 'recall'"):
        measure.read_last_json(path, "recall")


def test_measure_gives_every_number_and_five_prompts(small_inputs, tmp_path, tokenizer):
    inputs = small_inputs("whole")
    reward_json = tmp_path / "reward.json"
    reward_json.write_text('{"accuracy": 0.75}\n')
    base = str(inputs / "base")
    flags = ["--inputs", str(inputs), "--base", base, "--sft", base, "--ppo", base, "--device", "cpu"]
    flags += ["--reward_json", str(reward_json), "--output_dir", str(tmp_path), "--num_prompts", "12"]
    evaluations = [{"step": s, "eval/score": s / 8, "eval/win_rate": s / 64} for s in (0, 8, 16, 24)]
    flags += ["--ppo_run", str(write_run(tmp_path / "step3", evaluations))]
    flags += ["--num_scored", "30", "--max_response_tokens", "5", "--batch_size", "8"]
    args = measure.parse_args(flags)
    assert isinstance(args, argparse.Namespace)
    numbers, lines = measure.measure(args)
    assert set(numbers) == set(SUMMARY_KEYS) - {"seconds", "peak_gib"}
    assert numbers["kl"] == 0.0 and numbers["vader_sft"] == numbers["vader_ppo"]
    assert numbers["reward_accuracy"] == 0.75
    names = ("score_before", "score_halfway", "score_after", "win_rate")
    assert [numbers[name] for name in names] == [0.0, 2.0, 3.0, 0.375]
    # Random weights are nearly uniform over the 300 tokens.
    assert numbers["sft_perplexity"] == pytest.approx(300, rel=0.1)
    assert sum(line.startswith("Human: ") for line in lines) == 5
