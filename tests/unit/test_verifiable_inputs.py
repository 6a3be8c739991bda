"""The word problems of training_scripts/verifiable: right, all different, readable, and carelessly taught."""

import json
import random
from importlib.util import find_spec
from itertools import islice

import pytest
from transformers import AutoTokenizer

from step3_ppo.rewards.examples.arithmetic import right_answer
from training_scripts.verifiable import build_inputs
from training_scripts.verifiable.build_inputs import NUMBER, problems, taught_solution

needs_templates = pytest.mark.skipif(not find_spec("reasoning_gym"), reason="no reasoning-gym")
# By the template's first words; the numbers are those of the question.
ANSWERS = {
    "-graders at": lambda all_, girls, absent_girls, absent: all_ - girls - absent,
    "minutes to walk": lambda time, first, second: time - first - second,
    "students playing": lambda players, boys, girls: players + 2 * players + boys + girls,
}
SOLUTION = "There are 7 x 2 = 14 here.\nThere are 25 + 24 = 49 there.\nIn total 7 + 14 + 49 = 70.\n#### 70"


def expected(problem: dict[str, str]) -> tuple[str, list[int], int]:
    """Return the words that tell the template, the numbers of the question, and the answer by our formula."""
    numbers = [int(number) for number in NUMBER.findall(problem["prompt"])]
    [(words, compute)] = [pair for pair in ANSWERS.items() if pair[0] in problem["prompt"]]
    return words, numbers, compute(*numbers)


def is_right(problem: dict[str, str]) -> float:
    return right_answer([""], [problem["answer"]], [{"answer": expected(problem)[2]}])[0]


@needs_templates
def test_the_solutions_are_right_and_no_numbers_come_twice():
    some = list(islice(problems(random.Random(1)), 300))
    assert [problem for problem in some if not is_right(problem)] == []
    assert {expected(problem)[0] for problem in some} == set(ANSWERS)
    assert len({(words, *numbers) for words, numbers, _ in map(expected, some)}) == 300


@needs_templates
def test_the_three_files_share_no_problem_and_their_texts_come_back_from_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(build_inputs, "NUM_PROBLEMS", {"sft": 200, "prompts": 40, "held_out": 20})
    build_inputs.write_word_problems(tmp_path)
    parts = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "prompts", "held_out")
    }
    assert [len(part) for part in parts.values()] == [200, 40, 20]
    rows = [row for part in parts.values() for row in part]
    assert len({(words, *numbers) for words, numbers, _ in map(expected, rows)}) == 260
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert {len(token.strip()) for token in tokenizer.get_vocab() if NUMBER.search(token)} == {1}  # a digit
    for row in rows:
        text = row["prompt"] + row["answer"]
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text and tokenizer.pad_token_id not in ids
        num_prompt_tokens = len(tokenizer(row["prompt"]).input_ids)
        assert num_prompt_tokens <= 64 and len(ids) - num_prompt_tokens < 64  # the limits of run.sh
    assert 0.3 < sum(map(is_right, parts["sft"])) / 200 < 0.5
    assert all(map(is_right, parts["prompts"] + parts["held_out"]))


def test_a_careless_teacher_leaves_the_last_step_out():
    draw = random.Random(1)
    taught = [taught_solution(SOLUTION, draw) for _ in range(1000)]
    careless = "There are 7 x 2 = 14 here.\nThere are 25 + 24 = 49 there.\n#### 49"
    assert set(taught) == {SOLUTION, careless}
    assert 0.35 < taught.count(SOLUTION) / 1000 < 0.45
    assert right_answer([""] * 2, [SOLUTION, careless], [{"answer": SOLUTION}] * 2) == [1.0, 0.0]


def test_without_reasoning_gym_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(build_inputs, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps reasoning-gym$"):
        next(problems(random.Random(1)))
