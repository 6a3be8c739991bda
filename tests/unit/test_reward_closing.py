"""A reward model reads its score at the last token of what a chat template renders: in steps 2 and 3, at the
reward server and in plain transformers alike.
"""

import json

import pytest
import torch
from test_reward_server import load_scorer, plain_score
from transformers import AutoTokenizer

from common.data.chat_template import build_template
from common.data.collators import collate_pairs
from common.data.data_options import DataOptions
from common.data.example import Example, Message
from common.data.packed_batch import PackedBatch
from common.data.stage_rows import Item, RowBuilder
from common.data.token_cache import DataReport
from common.models.loading import ModelOptions
from common.models.value_model import load_value_model
from common.programs.conversation_form import closing_of
from common.runs.export import save_export
from step2_reward.answer_scores import compute_pair_scores
from step3_ppo.roles import Reward

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = (Message("user", "How are you?"),)
ANSWERS = ("I am fine, thank you.", "No.")


@pytest.fixture(scope="module")
def chat_export(tiny_model_folder, make_tokenizer, tmp_path_factory) -> str:
    tokenizer = make_tokenizer()
    names = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<|pad|>", CHATML
    model = load_value_model(ModelOptions(tiny_model_folder("llama"), dropout=0.0), len(tokenizer), seed=3)
    torch.nn.init.normal_(model.classifier.score.weight)
    folder = tmp_path_factory.mktemp("chat_reward") / "export"
    metadata = {"step": "reward", "template": "chat", "reads_closing": True}
    save_export(folder, model.classifier, tokenizer, metadata=metadata, needs_own_pad=True)
    return str(folder)


def rendered(tokenizer, answer: str) -> str:
    messages = [QUESTION[0].as_dict(), {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def test_all_that_score_read_the_same_token_as_plain_transformers(chat_export):
    tokenizer = AutoTokenizer.from_pretrained(chat_export)
    template = build_template("chat", tokenizer)
    expected = [plain_score(chat_export, rendered(tokenizer, answer)) for answer in ANSWERS]
    at_end_of_turn = [plain_score(chat_export, rendered(tokenizer, answer)[:-1]) for answer in ANSWERS]
    assert min(abs(a - b) for a, b in zip(expected, at_end_of_turn, strict=True)) > 1e-3

    model = load_value_model(ModelOptions(chat_export, dropout=0.0), len(tokenizer)).eval()
    options = DataOptions([], 2, is_scored=True)
    item = Item(Example(prompt=QUESTION, chosen=ANSWERS[0], rejected=ANSWERS[1]), "row", "rows:1")
    (row,) = RowBuilder(template, options, DataReport("pair")).build([item])
    for side, answer in zip(("chosen", "rejected"), ANSWERS, strict=True):
        assert tokenizer.decode(row[f"{side}_ids"]) == rendered(tokenizer, answer)
    with torch.no_grad():
        scores = compute_pair_scores(model, collate_pairs([row]))
    assert [scores.chosen.item(), scores.rejected.item()] == pytest.approx(expected, abs=1e-5)

    prompt = template.encode(template.segments(QUESTION, None), 100).input_ids
    responses = [row["chosen_ids"][len(prompt) :], row["rejected_ids"][len(prompt) :]]
    sampled = [torch.tensor(ids[: ids.index(template.eot_id) + 1]) for ids in responses]
    batch = PackedBatch.build(range(2), {"prompt_ids": [torch.tensor(prompt)] * 2, "response_ids": sampled})
    batch = batch.with_numbers("is_finished", torch.tensor([True, True]))
    role = Reward(model, is_packed=False)
    role.closing_ids = closing_of(chat_export, template)
    (of_step_3,) = role.score([batch])
    assert of_step_3.tolist() == pytest.approx(expected, abs=1e-5)
    cut = batch.with_numbers("is_finished", torch.tensor([True, False]))
    (of_cut,) = role.score([cut])
    assert of_cut[0] == of_step_3[0]
    text = rendered(tokenizer, ANSWERS[1])[: -len("\n")]
    assert of_cut[1].item() == pytest.approx(plain_score(chat_export, text), abs=1e-5), (
        "no closing behind a cut"
    )

    prompt_text = template.prompt_text(QUESTION)
    assert load_scorer(chat_export).score([prompt_text] * 2, list(ANSWERS)) == pytest.approx(
        expected, abs=1e-5
    )


def test_a_server_keeps_to_its_batch_size_and_with_the_closing_to_its_limit(chat_export, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(chat_export)
    prompt = build_template("chat", tokenizer).prompt_text((Message("user", "How are you? " * 9),))
    scorer, passes = load_scorer(chat_export, max_seq_len=14), []
    monkeypatch.setattr(scorer, "_score_batch", lambda rows: passes.append(rows) or [0.0] * len(rows))
    scorer.score([prompt] * 3, ["No."] * 3)
    assert [[len(row) for row in rows] for rows in passes] == [[14, 14], [14]]
    assert tokenizer.decode([token_id for token_id, _ in passes[0][0]]).endswith("assistant\nNo.<|im_end|>\n")


def test_with_the_mean_of_values_the_closing_counts_in_step_3_as_in_step_2(chat_export):
    tokenizer = AutoTokenizer.from_pretrained(chat_export)
    template = build_template("chat", tokenizer)
    options = ModelOptions(chat_export, dropout=0.0)
    model = load_value_model(options, len(tokenizer), pooling="mean").eval()
    item = Item(Example(prompt=QUESTION, chosen=ANSWERS[0], rejected=ANSWERS[1]), "row", "rows:1")
    (row,) = RowBuilder(template, DataOptions([], 2, is_scored=True), DataReport("pair")).build([item])
    with torch.no_grad():
        scores = compute_pair_scores(model, collate_pairs([row]))
    start = row["chosen_response_start"]
    prompt, response = (torch.tensor(ids) for ids in (row["chosen_ids"][:start], row["chosen_ids"][start:-1]))
    batch = PackedBatch.build([0], {"prompt_ids": [prompt], "response_ids": [response]})
    batch = batch.with_numbers("is_finished", torch.tensor([True]))
    batch = batch.with_key("sampled_mask", torch.ones(len(response), dtype=torch.bool), like="response_ids")
    role = Reward(model, is_packed=False)
    role.closing_ids = template.closing_ids
    (of_step_3,) = role.score([batch])
    torch.testing.assert_close(of_step_3, scores.chosen, atol=1e-5, rtol=1e-5)


def test_pairs_of_a_policy_end_with_the_end_of_turn(chat_export):
    template = build_template("chat", AutoTokenizer.from_pretrained(chat_export))
    item = Item(Example(prompt=QUESTION, chosen=ANSWERS[0], rejected=ANSWERS[1]), "row", "rows:1")
    (row,) = RowBuilder(template, DataOptions([], 2), DataReport("pair")).build([item])
    assert row["chosen_ids"][-1] == template.eot_id


def test_a_reward_model_of_an_earlier_version_is_read_at_the_end_of_turn(chat_export, tmp_path):
    template = build_template("chat", AutoTokenizer.from_pretrained(chat_export))
    assert closing_of(chat_export, template) == template.closing_ids != []
    assert closing_of(str(tmp_path), template) == template.closing_ids, "one of another origin"
    (tmp_path / "triptych.json").write_text(json.dumps({"step": "reward", "template": "chat"}))
    assert closing_of(str(tmp_path), template) == []


def test_a_token_of_the_conversation_does_not_become_pad(make_tokenizer, tiny_model_folder, tmp_path):
    """Torch does not train the embedding of PAD."""
    for names, pad in ((["<|im_start|>", "<|im_end|>"], "<|endoftext|>"), (["<|im_start|>"], "<|pad|>")):
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": names})
        tokenizer.eos_token = tokenizer.pad_token = names[-1] if len(names) > 1 else "<|endoftext|>"
        tokenizer.chat_template = CHATML.replace("<|im_end|>", tokenizer.eos_token)
        model = load_value_model(ModelOptions(tiny_model_folder("llama")), len(tokenizer), seed=3)
        folder = tmp_path / str(len(names))
        save_export(folder, model.classifier, tokenizer, metadata={"template": "chat"}, needs_own_pad=True)
        assert AutoTokenizer.from_pretrained(folder).pad_token == pad
