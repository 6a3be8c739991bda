"""The demo's inputs and measures, against values worked out by hand."""

import itertools
import json
import math
import re
from collections import Counter

import chitchat_dataset
import pytest
import torch
from made_runs import write_run
from transformers import LlamaConfig, LlamaForCausalLM

from common.data.chat_template import build_template
from common.data.dialogue import Tokenised
from training_scripts.demo import build_inputs, composed, measure, text_measures
from training_scripts.demo.build_inputs import Turn
from training_scripts.demo.measure import NUMBERS, format_summary, missed_aims

TURNS = [
    Turn("How are you?", "I'm fine, thanks! And YOU?"),
    Turn("What do you do?", "I study math"),
    Turn("Nice.", "yeah it is nice"),
    Turn("Where do you live?", "in a small town"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_inputs.build_tokenizer(TURNS)


@pytest.fixture(scope="module")
def template(tokenizer):
    return build_template("human_assistant", tokenizer)


@pytest.fixture
def prompts(tokenizer):
    return tokenizer([turn.prompt for turn in TURNS])["input_ids"]


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


def test_distinct_2_counts_pairs_of_words_within_each_text():
    # (i, am) (am, i) (i, am) | (i, am) (am, fine): 5 pairs, 3 different
    assert text_measures.distinct_2(["I am i am", "i am fine"]) == pytest.approx(3 / 5)
    assert text_measures.distinct_2(["a", "b a", "", "b"]) == 1.0  # texts are not joined
    assert text_measures.distinct_2(["a", "b"]) == 0.0


def is_on_topic(message, reply):
    return text_measures.is_on_topic([message], [reply], by_minilm=False) == [True]


def test_a_reply_is_on_topic_when_it_has_words_of_the_messages_topic():
    message = "I baked a loaf of bread, but the dough did not rise."
    assert is_on_topic(message, "Next time, give the dough an extra hour in a warm spot.")
    assert is_on_topic(message, "Forget baking bread.")
    assert not is_on_topic(message, "There is nothing like a garden in bloom.")
    assert not is_on_topic(message, "Good luck!")


def test_of_a_topic_that_was_held_out_the_nearest_counts(monkeypatch):
    axes = ["saving money", "volunteering", "drawing", "meditating", "stargazing", "making jam", "climbing"]

    def embed(texts):  # a text's vector is the axis of the topic whose name it has
        return torch.tensor([[float(axis in text) for axis in axes] for text in texts])

    monkeypatch.setattr(text_measures, "embed", embed)
    messages = ["Do you like drawing?", "Do you like drawing?", "Please tell me about stargazing."]
    replies = ["I find drawing lovely.", "I find climbing lovely.", "Why not, stargazing is fun."]
    assert text_measures.is_on_topic(messages, replies, by_minilm=True) == [True, False, True]


def test_lints_by_a_grammar_checker():
    assert text_measures.lint_free(["I love fresh bread.", "He go to teh shop.", ""]) == pytest.approx(1 / 3)


def test_trigrams_by_hand():
    counts = text_measures.count_trigrams(["a b", "a c"])
    # words: a 2, b 1, c 1, </s> 2 of 6; 5 kinds with the unknown one: one word (n + 1) / 11
    first = 0.1 * 3 / 11 + 0.3 * 2 / 2 + 0.6 * 2 / 2  # a, after <s> <s>; <s> came before a word twice
    second = 0.1 * 2 / 11 + 0.3 * 1 / 2 + 0.6 * 1 / 2  # b, after <s> a
    end = 0.1 * 3 / 11 + 0.3 * 1 / 1 + 0.6 * 1 / 1
    expected = (math.log(first) + math.log(second) + math.log(end)) / 3
    assert text_measures.trigram_logprob(counts, ["a b", ""]) == pytest.approx(expected)
    unknown = 0.1 * 1 / 11
    found = text_measures.trigram_logprob(counts, ["x"])
    assert found == pytest.approx((math.log(unknown) + math.log(0.1 * 3 / 11)) / 2)


def test_a_models_log_probability_equals_a_plain_loop(tokenizer):
    model = tiny_model(tokenizer, seed=0)
    texts = ["I study math", "", "yeah it is nice and in a small town"]
    start, values = [tokenizer.eos_token_id], []
    for text in filter(None, texts):
        ids = tokenizer(text)["input_ids"]
        values.append(sum_of_logprobs(model, start, ids) / len(ids))
    found = text_measures.mean_logprob(model, tokenizer, texts)
    assert found == pytest.approx(sum(values) / 2, rel=1e-5)


# --- composed conversations


def test_composed_turns_differ_and_no_held_out_phrase_is_trained_on():
    train, held_out = (composed.compose_turns(part, 3000, seed=1) for part in ("train", "eval"))
    assert len(set(train)) == 3000 and train == composed.compose_turns("train", 3000, seed=1)
    assert not {message for message, _ in train} & {message for message, _ in held_out}
    topics = {number for message, _ in train for number in composed.topics_in(message)}
    assert topics == set(range(len(composed.load_topics()))) and len(topics) >= 60
    for message, reply in train + held_out:
        assert composed.topics_in(message) and not set("{}") & set(message + reply), (message, reply)


def flaw_of(message, rejected):
    if any(rejected.startswith(start) for start in composed.CURT[0]):
        return "curt"
    if not rejected.endswith((".", "!", "?")):
        return "broken off"
    if len(re.findall("[.!?]", rejected)) > 3:
        return "too long"
    return "kind" if is_on_topic(message, rejected) else "off topic"


def test_of_a_composed_pair_the_chosen_reply_is_kind_and_on_topic_and_the_other_has_a_flaw():
    pairs = composed.compose_pairs("train", 500, seed=1)
    assert all(is_on_topic(message, chosen) for message, chosen, _ in pairs)
    assert {flaw_of(message, chosen) for message, chosen, _ in pairs} == {"kind"}
    flaws = Counter(flaw_of(message, rejected) for message, _, rejected in pairs)
    assert set(flaws) == set(composed.FLAWS) and min(flaws.values()) > 80, flaws


def test_held_out_topics_are_in_no_row_of_training():
    def topics(compose, part):
        rows = compose(part, 1000, seed=1, hold_out_topics=True)
        return {number for row in rows for text in row for number in composed.topics_in(text)}

    last = set(range(len(composed.load_topics()))[-composed.NUM_HELD_OUT_TOPICS :])
    for compose in (composed.compose_turns, composed.compose_pairs):
        assert topics(compose, "eval") == last and not topics(compose, "train") & last


def test_unigram_perplexity_by_hand():
    # train counts 0: 3, 1: 1, add one over 4 tokens: p(0) = 4/8, p(1) = 2/8, p(2) = p(3) = 1/8
    train = [Tokenised([2, 0, 0, 1], [False, True, True, True], False), Tokenised([0], [True], False)]
    held_out = [Tokenised([2, 0, 1, 3], [False, True, True, True], False)]
    value = measure.unigram_perplexity(train, held_out, vocab_size=4)
    assert value == pytest.approx((0.5 * 0.25 * 0.125) ** (-1 / 3))


# --- samples


def sum_of_logprobs(model, prompt, reply):
    """The plain loop: one unpadded forward pass a token, in float64."""
    total = 0.0
    for position in range(len(reply)):
        logits = model(torch.tensor([prompt + reply[:position]])).logits[0, -1].double()
        total += logits.log_softmax(-1)[reply[position]].item()
    return total


def test_a_sampled_reply_has_no_prompt_and_no_special_token_and_is_the_same_each_time(tokenizer, prompts):
    model = tiny_model(tokenizer, seed=0)
    texts = measure.sample_replies(model, tokenizer, prompts, batch_size=3)
    assert len(texts) == len(prompts) and all(texts)
    assert not any("<|" in text or turn.context in text for text, turn in zip(texts, TURNS, strict=True))
    assert texts == measure.sample_replies(model, tokenizer, prompts, batch_size=3)
    for narrow in ({"temperature": 1e-3}, {"top_p": 1e-3}):  # only the likeliest token is left
        first, second = measure.sample_replies(model, tokenizer, prompts[:1] * 2, 1, **narrow)
        assert first == second


def test_model_perplexity_equals_a_plain_loop_over_response_tokens(tokenizer, template, prompts, tmp_path):
    model = tiny_model(tokenizer, seed=0)
    lines = [json.dumps({"prompt": turn.prompt, "answer": turn.reply}) for turn in TURNS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    _, rows = measure.tokenise(tmp_path / "rows.jsonl", template)
    total, count = 0.0, 0
    for turn, prompt in zip(TURNS, prompts, strict=True):
        reply = tokenizer(f" {turn.reply}{tokenizer.eos_token}")["input_ids"]
        total -= sum_of_logprobs(model, prompt, reply)
        count += len(reply)
    expected = pytest.approx(math.exp(total / count), rel=1e-5)
    assert measure.model_perplexity(model, rows, batch_size=3) == expected


# --- inputs


def test_many_pairs_keep_gap_and_tolerance_use_a_reply_once_and_a_fair_coin_for_the_prompt():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (3000,), generator=generator).tolist()
    scores = (torch.rand(3000, generator=generator) * 2 - 1).tolist()
    pairs = build_inputs.pair_by_sentiment(scores, lengths, 3000, seed=0)
    used = [index for pair in pairs for index in pair[:2]]
    assert len(set(used)) == len(used) > 2400
    assert all(scores[chosen] - scores[rejected] >= 0.5 for chosen, rejected, _ in pairs)
    assert max(abs(lengths[chosen] - lengths[rejected]) for chosen, rejected, _ in pairs) == 1
    chosen_lengths, rejected_lengths = ([lengths[pair[side]] for pair in pairs] for side in (0, 1))
    longer = sum(a > b for a, b in zip(chosen_lengths, rejected_lengths, strict=True))
    shorter = sum(a < b for a, b in zip(chosen_lengths, rejected_lengths, strict=True))
    assert longer / (longer + shorter) == pytest.approx(0.5, abs=0.05), "length tells nothing"
    assert sum(pair[2] == pair[0] for pair in pairs) / len(pairs) == pytest.approx(0.5, abs=0.05)


@pytest.fixture(scope="module")
def write_inputs():
    """Writes the inputs of the first conversations: all of them take half a minute."""
    some = [list(one) for one in itertools.islice(chitchat_dataset.ConversationDataset(), 400)]

    def write(folder, data):
        words = [str(folder), "--data", data, "--num_train_pairs", "60", "--num_eval_pairs", "20"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_inputs, "NUM_COMPOSED", {"train": 600, "eval": 60})
            patch.setattr("chitchat_dataset.ConversationDataset", lambda: some)
            build_inputs.write_inputs(build_inputs.parse_args(words))

    return write


@pytest.fixture(scope="module", params=["composed", "human"])
def data(request):
    return request.param


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory, write_inputs, data):
    """What the demo's steps would leave: inputs, the same model thrice, and what the steps said."""
    folder = tmp_path_factory.mktemp("demo")
    write_inputs(folder / "inputs", data)
    evaluations = [
        {"step": s, "eval/score": s / 8, "eval/win_rate": s / 64, "eval/kl": s / 6} for s in (0, 8, 16, 24)
    ]
    evaluations[1]["perf/peak_memory_gib"] = 500.0
    for step in ("step1", "step3"):
        write_run(folder / step, evaluations, about={"starts": [{"world_size": 2}]})
        (folder / step / "export").symlink_to(folder / "inputs" / "base")
    (folder / "reward_eval.log").write_text('{noise\n{"accuracy": 0.75}\nmore\n')
    return folder


def read_rows(path):
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text("utf-8").splitlines()]


def test_inputs_are_the_same_for_one_seed_and_share_no_turn(output_dir, tmp_path, write_inputs, data):
    write_inputs(tmp_path, data)
    first = output_dir / "inputs"
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert {"base/model.safetensors", "prompts/eval.jsonl"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (tmp_path / name).read_bytes(), name
    pairs, train, held_out = (read_rows(first / name) for name in ("pairs/train", "sft/train", "sft/eval"))
    assert 20 <= len(pairs) <= 60 and pairs[0].keys() == {"prompt", "chosen", "rejected"}
    shared = {tuple(row.values()) for row in train} & {tuple(row.values()) for row in held_out}
    assert len(shared) / len(held_out) < 0.01  # but for what anybody says


def test_measure_gives_every_number_and_five_prompts(output_dir, data, monkeypatch):
    for module in (measure, text_measures):
        monkeypatch.setattr(module, "find_smollm2", lambda: None)
    words = [
        str(output_dir),
        "--data",
        data,
        "--num_prompts",
        "12",
        "--num_scored",
        "30",
        "--batch_size",
        "8",
    ]
    numbers, lines = measure.measure(measure.parse_args(words))
    assert set(numbers) == NUMBERS.keys() - {"seconds", "peak_gib"}
    assert numbers["target_sft"] == numbers["target_ppo"] and numbers["fluency_sft"] == numbers["fluency_ppo"]
    names = ("reward_accuracy", "score_before", "score_halfway", "score_after", "win_rate", "kl")
    assert [numbers[name] for name in names] == [0.75, 0.0, 2.0, 3.0, 0.375, 4.0]
    assert sum(line.startswith("Human: ") for line in lines) == 5
    assert measure.peak_gib(output_dir) == 1000.0  # of both ranks
    listed = (output_dir / "replies.md").read_text("utf-8").splitlines()
    assert sum(line.startswith("| ") for line in listed) == 1 + 12


# --- the summary

GOOD = (
    400,
    40,
    0.9,
    -0.5,
    0.5,
    1.0,
    0.7,
    0.2,
    0.5,
    -3.0,
    -3.0,
    -2.5,
    0.9,
    0.9,
    5.0,
    0.9,
    0.8,
    8.0,
    7.0,
    300,
    1.0,
)
MISSED = {
    "sft_perplexity": 50, "reward_accuracy": 0.849, "win_rate": 0.59, "target_ppo": 0.449, "kl": 10.1,
    "fluency_ppo": -3.01, "lint_free_ppo": 0.89,
    "distinct2_ppo": 0.449, "words_ppo": 4.79, "seconds": 481, "peak_gib": 4.01,
}  # fmt: skip


def test_each_aim_is_met_or_missed():
    good = dict(zip(NUMBERS, GOOD, strict=True))
    lines = format_summary(good)
    assert len(lines) == len(NUMBERS) and sum(" met " in line for line in lines) == len(MISSED)
    assert missed_aims(good) == []
    for key, value in [*MISSED.items(), ("kl", math.nan)]:
        assert missed_aims({**good, key: value}) == [key]
    assert any(" missed " in line for line in format_summary(good | {"kl": 10.1}))
    good |= {"target_ppo": 0.55}
    assert missed_aims(good | {"seconds": 1500, "peak_gib": 10}, "smollm2") == []
    assert missed_aims(good | {"seconds": 1501, "peak_gib": 10.1}, "smollm2") == ["seconds", "peak_gib"]
    assert missed_aims(good | {"target_ppo": 0.54}, "smollm2") == ["target_ppo"]
    assert missed_aims(good | {"target_ppo": 0.54}) == []
    assert any("aim: at most 1500" in line for line in format_summary(good, "smollm2"))
