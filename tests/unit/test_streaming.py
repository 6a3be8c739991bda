"""Answers token by token: what is heard is what comes out, and who has heard enough ends an answer."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.data.example import Message
from common.flags.args import Problems
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator
from common.generation.inference_module import share_weights
from serving.answering import Answerer, AnsweringArguments, Sampling, load_answerer, load_template

PROMPTS = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10], [0, 11, 12, 13]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]).bool()
OPTIONS = SamplingOptions(max_new_tokens=12, stop_token_id=3, pad_token_id=0, seed=5)
QUESTION = [Message("user", "How are you today?")]


@pytest.fixture(scope="module")
def generator(tiny_model_folder) -> Generator:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama")).eval()
    return Generator(share_weights(model), num_slots=2)  # fewer than samples: they come and go


@pytest.fixture
def answerer(tiny_model_folder) -> Answerer:
    folder, args = tiny_model_folder("llama"), AnsweringArguments()
    template = load_template("--path", folder, args, Problems())
    return load_answerer(folder, template, args, Sampling(12), seed=0)


def test_a_listener_ends_one_response_and_no_other(generator):
    def listen(sample: int, token_ids: list[int]) -> bool:
        counts[sample] = counts.get(sample, 0) + len(token_ids)
        return sample == 1 and counts[sample] == 3

    counts: dict[int, int] = {}
    ids = torch.arange(3)
    whole = generator.generate(PROMPTS, MASK, ids, OPTIONS)
    cut = generator.generate(PROMPTS, MASK, ids, OPTIONS, on_tokens=listen)
    lengths = whole.response_mask.sum(1).tolist()
    assert lengths[1] > 3 and cut.response_mask.sum(1).tolist() == [lengths[0], 3, lengths[2]]
    assert not cut.is_finished[1]
    assert torch.equal(cut.response_ids[1, :3], whole.response_ids[1, :3])
    assert torch.equal(cut.response_ids[0], whole.response_ids[0, : cut.response_ids.shape[1]])


def test_the_streamed_answer_is_the_answer(answerer):
    told: list[str] = []
    ids, seeded = answerer.encode(QUESTION), dataclasses.replace(answerer.sampling, seed=1, num_answers=3)
    texts = {0: "", 1: "", 2: ""}

    def listen(number: int, text: str) -> bool:
        told.append(text)
        texts[number] += text
        return False

    answers = answerer.respond(ids, seeded, on_text=listen)
    plain = answerer.respond(ids, seeded)
    assert answers == plain and [a.text for a in answers] == list(texts.values())
    assert len(told) > 6 and all(told), "it came in pieces"
    for answer in answers:
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 0 else "length")


def test_an_answer_ends_before_a_stop_text_and_is_not_drawn_further(answerer):
    ids, seeded = answerer.encode(QUESTION), dataclasses.replace(answerer.sampling, seed=1)
    [whole] = answerer.respond(ids, seeded)
    stop = whole.text[3:5]
    [cut] = answerer.respond(ids, dataclasses.replace(seeded, stop=("never there", stop)))
    assert cut.text == whole.text[: whole.text.index(stop)].strip() and cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(whole.token_ids)


def test_who_has_heard_enough_ends_the_answer(answerer):
    ids, told = answerer.encode(QUESTION), []
    [answer] = answerer.respond(ids, on_text=lambda _, text: told.append(text) or len(told) == 2)
    assert answer.finish_reason == "cancelled" and answer.text == "".join(told) and len(told) == 2
    assert len(answer.token_ids) < 12
