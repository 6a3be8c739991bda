"""A saved model that answers: the greedy text of transformers, prompts that fit, memory kept; token by token
what is heard is what comes out, and who has heard enough ends an answer.
"""

import dataclasses
import json
import threading

import pytest
import torch
from pretended_gpu import pretended_gpu
from transformers import AutoModelForCausalLM

from common.data.example import Message
from common.flags.args import Problems
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.generation.request_loop import SharedGenerator, device_turn
from serving import prompt_eval
from serving.answering import Answerer, Sampling, load_answerer, load_template
from serving.arguments import AnsweringArguments

QUESTIONS = [
    (Message("user", "How are you today?"),),
    (Message("user", "What is the weather like?"),),
    (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "Who are you?")),
]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


def load(folder: str, *, seed: int | None = None, no_cuda_graphs: bool = False, **sampling) -> Answerer:
    args = AnsweringArguments(no_cuda_graphs=no_cuda_graphs)
    template = load_template("--path", folder, args, Problems())
    return load_answerer(folder, template, args, Sampling(**{"max_new_tokens": 12} | sampling), seed=seed)


@pytest.fixture
def prompts_read(monkeypatch, tiny_tokenizer) -> list[str]:
    """The texts of all prompts that a model reads, in order."""
    texts: list[str] = []
    run = SharedGenerator.run

    def spy(self, request):
        texts.append(tiny_tokenizer.decode(request.prompt_ids))
        return run(self, request)

    monkeypatch.setattr(SharedGenerator, "run", spy)
    return texts


def asked_text(answerer, messages):
    """The conversation as the export's chat template renders it."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    form = {"chat_template": answerer.template.chat_template, "add_generation_prompt": True}
    return answerer.tokenizer.apply_chat_template(turns, tokenize=False, **form)


def test_scores_wait_while_another_request_captures_its_passes(tiny_model_folder):
    """Copies and pinned memory of another thread would end the capture."""
    with pretended_gpu() as gpu:
        answerer = load(tiny_model_folder("llama"))
        gpu.clear()
        scores = []
        scoring = threading.Thread(target=lambda: scores.extend(answerer.score([5, 6, 7, 8], 2)))
        with device_turn(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            scoring.start()
            scoring.join(0.5)
            assert scoring.is_alive() and not gpu.copies
        scoring.join(30)
    assert len(scores) == 4 and gpu.copies


def test_greedy_answers_are_those_of_transformers(tiny_model_folder, tiny_tokenizer):
    folder = tiny_model_folder("gpt2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    answerer = load(folder, **GREEDY)
    for question in QUESTIONS:
        text = asked_text(answerer, question)
        prompt = tiny_tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        whole = model.generate(**prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
        reply = whole[0, prompt.input_ids.shape[1] :]
        assert answerer.answer(question) == [tiny_tokenizer.decode(reply, skip_special_tokens=True).strip()]


def test_a_question_asked_again_gets_other_answers_and_a_seed_the_same(tiny_model_folder):
    seeded, alike, free = (load(tiny_model_folder("llama"), num_answers=2, seed=s) for s in (0, 0, None))
    expected = [seeded.answer(question) for question in QUESTIONS]
    assert expected == [alike.answer(question) for question in QUESTIONS]
    assert len({text for answers in expected for text in answers}) == 6
    assert expected[0] != seeded.answer(QUESTIONS[0]), "asked again: other random numbers"
    assert expected[0] != free.answer(QUESTIONS[0]), "no seed: other random numbers in every process"
    again = load(tiny_model_folder("llama"), num_answers=2, seed=5)
    texts = [text for _ in range(3) for text in again.answer(QUESTIONS[0])]
    assert len(set(texts)) == 6 and not set(texts) & set(expected[0]), "each its own, and of this seed"


def test_a_request_is_sampled_as_it_says(tiny_model_folder, monkeypatch):
    """With its own seed from the first random numbers on, else with those that follow the answers before."""
    asked, answerer = [], load(tiny_model_folder("llama"), seed=9)
    monkeypatch.setattr(SharedGenerator, "run", lambda self, request: asked.append(request))
    ids, sampling = answerer.encode(QUESTIONS[0]), Sampling(7, 0.5, top_k=3, top_p=0.8, num_answers=2)
    for changes in ({}, {"seed": 5}, {"seed": 0}, {"temperature": 0.0, "num_answers": 1}, {}):
        answerer.respond(ids, dataclasses.replace(sampling, **changes))
    expected = {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "do_sample": True}
    for request in (asked[0], asked[1], asked[4]):
        assert {name: getattr(request.options, name) for name in expected} == expected
    assert not asked[3].options.do_sample and [r.options.seed for r in asked] == [9, 5, 0, 9, 9]
    assert [r.sample_ids for r in asked] == [[0, 1], [0, 1], [0, 1], [2], [3, 4]]
    assert [r.num_open for r in asked] == [2, 2, 2, 1, 2] and {r.options.max_new_tokens for r in asked} == {7}


def test_memory_is_kept_from_turn_to_turn(tiny_model_folder):
    answerer = load(tiny_model_folder("gpt2"), **GREEDY)
    generator = answerer._shared.generator
    answerer.answer(QUESTIONS[2])
    blocks = [block.data_ptr() for block in generator._step.cache.keys]
    answerer.answer(QUESTIONS[0])
    assert [block.data_ptr() for block in generator._step.cache.keys] == blocks
    answerer.answer((Message("user", "fox " * 500),))
    assert generator._step.cache.max_length == 128, "no more than the model has positions"


def test_graphs_can_be_switched_off(tiny_model_folder):
    for is_off in (False, True):
        answerer = load(tiny_model_folder("gpt2"), no_cuda_graphs=is_off)
        assert (answerer._shared.generator._graphs is None) == is_off


def test_a_long_conversation_loses_its_oldest_turns_whole(tiny_model_folder, prompts_read):
    answerer = load(tiny_model_folder("gpt2"), **GREEDY)  # 128 positions
    system = (Message("system", "Be kind."),)
    said: tuple[Message, ...] = ()
    for number in range(8):
        said += (Message("user", f"What is the weather like on day {number}?"),)
        for head in ((), system):
            answerer.answer(head + said)
            dropped = next(i for i in range(8) if f"day {i}?" in prompts_read[-1])
            assert prompts_read[-1] == asked_text(answerer, head + said[2 * dropped :])
            longer = head + said[2 * max(dropped - 1, 0) :]
            assert dropped == 0 or answerer.template._count_tokens(longer, "") > answerer.max_prompt_tokens
        said += (Message("assistant", "It is a sunny day."),)
    assert dropped > 0


def test_an_answer_fits_into_the_models_positions(tiny_model_folder, prompts_read):
    long_turn = (Message("user", "the quick brown fox " * 100 + "ends here"),)
    greedy = load(tiny_model_folder("gpt2"), temperature=0.0, max_new_tokens=1000)
    [text] = greedy.answer(long_turn)
    assert prompts_read[-1].endswith("s here\n\nAssistant:")
    assert greedy.sampling.max_new_tokens == 120 and text
    for room in (3, 1):  # less than a request asks for
        ids = (greedy.encode(QUESTIONS[0]) * 128)[: 128 - room]
        [answer] = greedy.respond(ids, dataclasses.replace(greedy.sampling, max_new_tokens=20))
        assert (len(answer.token_ids), answer.finish_reason) == (room, "length")
        assert not greedy.why_too_long(ids)
    assert "the prompt has 128 tokens" in greedy.why_too_long([*ids, 5])


def test_a_model_that_cannot_answer_is_named(tiny_model_folder, tmp_path):
    folder, problems = tiny_model_folder("gpt2"), Problems()
    assert load_template("--path", str(tmp_path), AnsweringArguments(), problems) is None
    assert load_template("--path", folder, AnsweringArguments(template="chat"), problems) is None
    nothing_there, no_chat_template = problems.messages
    assert nothing_there.startswith(f"--path {tmp_path} has no config.json")
    assert f"{folder}: --template chat: the tokenizer has no chat template" in no_chat_template


# ---- token by token


@pytest.fixture
def answerer(tiny_model_folder) -> Answerer:
    return load(tiny_model_folder("llama"), seed=0)


def test_a_listener_ends_one_response_and_no_other(tiny_model_folder):
    def listen(sample: int, token_ids: list[int]) -> bool:
        counts[sample] = counts.get(sample, 0) + len(token_ids)
        return sample == 1 and counts[sample] == 3

    counts: dict[int, int] = {}
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama")).eval()
    generator = Generator(share_weights(model), num_slots=2)  # fewer than samples: they come and go
    options = SamplingOptions(max_new_tokens=12, stop_token_id=3, pad_token_id=0, seed=5)
    prompts, ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10], [0, 11, 12, 13]]), torch.arange(3)
    batch = PromptBatch(prompts, prompts > 0, ids)
    whole = generator.generate(batch, options)
    cut = generator.generate(batch, options, on_tokens=listen)
    lengths = whole.response_mask.sum(1).tolist()
    assert lengths[1] > 3 and cut.response_mask.sum(1).tolist() == [lengths[0], 3, lengths[2]]
    assert not cut.is_finished[1]
    assert torch.equal(cut.response_ids[1, :3], whole.response_ids[1, :3])
    assert torch.equal(cut.response_ids[0], whole.response_ids[0, : cut.response_ids.shape[1]])


def test_the_streamed_answer_is_the_answer(answerer):
    told: list[str] = []
    ids, seeded = answerer.encode(QUESTIONS[0]), dataclasses.replace(answerer.sampling, seed=1, num_answers=3)
    texts = {0: "", 1: "", 2: ""}

    def listen(number: int, text: str) -> None:
        told.append(text)
        texts[number] += text

    answers = answerer.respond(ids, seeded, on_text=listen)
    plain = answerer.respond(ids, seeded)
    assert answers == plain and [a.text for a in answers] == list(texts.values())
    assert len(told) > 6 and all(told), "it came in pieces"
    for answer in answers:
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 0 else "length")


def test_an_answer_ends_before_a_stop_text_and_is_not_drawn_further(answerer):
    ids, seeded = answerer.encode(QUESTIONS[0]), dataclasses.replace(answerer.sampling, seed=1)
    [whole] = answerer.respond(ids, seeded)
    stop = whole.text[3:5]
    [cut] = answerer.respond(ids, dataclasses.replace(seeded, stop=("never there", stop)))
    assert cut.text == whole.text[: whole.text.index(stop)].strip() and cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(whole.token_ids)


def test_who_has_heard_enough_ends_the_answer(answerer):
    ids, told = answerer.encode(QUESTIONS[0]), []
    listener = {"on_text": lambda _, text: told.append(text), "is_gone": lambda: len(told) == 2}
    [answer] = answerer.respond(ids, **listener)
    assert answer.finish_reason == "cancelled" and answer.text == "".join(told) and len(told) == 2
    assert len(answer.token_ids) < 12


# ---- two models asked the same, side by side


@pytest.fixture
def compare(tiny_model_folder, monkeypatch, capsys):
    """Run prompt_eval.py on two models; return what it printed and what it said beside."""

    def run(*flags: str) -> tuple[str, str]:
        models = ["--model_name_or_path_baseline", tiny_model_folder("gpt2")]
        models += ["--model_name_or_path_finetune", tiny_model_folder("llama")]
        monkeypatch.setattr("sys.argv", ["prompt_eval.py", *models, *flags])
        prompt_eval.main()
        return tuple(capsys.readouterr())

    return run


def test_all_models_answers_stand_below_each_prompt(tiny_model_folder, compare, tmp_path):
    texts = [question[0].content for question in QUESTIONS]
    rows = [{"prompt": f"\n\nHuman: {text}\n\nAssistant:"} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data_path", str(tmp_path / "rows.jsonl"), "--num_prompts", "2", "--max_new_tokens", "8"]
    answers = {}
    for kind, family in (("baseline", "gpt2"), ("finetune", "llama")):
        answerer = load(tiny_model_folder(family), max_new_tokens=8, top_k=4, num_answers=2, seed=1234)
        answers[kind] = [answerer.answer(question) for question in QUESTIONS[:2]]
    expected = ""
    for index, text in enumerate(texts[:2]):
        expected += f"\n{text}\n"
        for kind in answers:
            assert len(set(answers[kind][index])) == 2
            expected += "".join(f"  {kind}: {answer}\n" for answer in answers[kind][index])
    assert compare(*flags, "--num_return_sequences", "2")[0] == expected


def test_built_in_questions_and_flags_that_do_nothing(compare):
    out, said = compare("--language", "Japanese", "--max_new_tokens", "4", "--num_beams", "4")
    assert all(question in out for question in prompt_eval.QUESTIONS["Japanese"])
    assert out.count("  baseline: ") == out.count("  finetune: ") == 2
    assert said.startswith("note: --num_beams has no effect: ")
