#!/usr/bin/env python
"""Inputs of tasks with verifiable answers, taught by an error-prone teacher.

    python training_scripts/verifiable/build_inputs.py OUT [sums | gsm]

"sums": two digits to add; the teacher is right 40 % of the time. Every sum is trained on.

"gsm": word problems of reasoning-gym's gsm_symbolic (GSM8K's templates, new numbers) with their solutions;
the teacher leaves out the last step in 60 %. Problems of SFT, prompts and held-out prompts have different
numbers.

OUT/base is a small random Llama with a tokenizer, OUT/sft.jsonl the teacher's answers, OUT/prompts.jsonl
prompts with right answers, OUT/held_out.jsonl (gsm) others. An SFT model is therefore right about as often
as its teacher; the reward is 1 for a right answer.
"""

import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RIGHT_FRACTION = 0.4
SEED = 7
Row = dict[str, str]  # prompt and chosen, or prompt and answer


def build_tokenizer(texts: Iterable[str], token: str) -> PreTrainedTokenizerFast:
    """A tokenizer of all matches of `token` in the texts; <eos> ends a turn, <pad> is separate."""
    tokens = dict.fromkeys(match for text in texts for match in re.findall(token, text))
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *tokens])}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(token), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def save_base_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **shape: float) -> None:
    """Write a random Llama of this shape with the tokenizer."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        **shape,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- sums ---------------------------------------------------------------------------------------------

CHARACTERS = "0123456789+= "
COPIES = 40  # of each sum in the SFT data


def sums() -> list[tuple[str, int]]:
    """Every sum of two digits with its value."""
    return [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]


def taught_answer(value: int, draw: random.Random) -> int:
    """The teacher's answer: the value, or one of the four numbers next to it."""
    if draw.random() < RIGHT_FRACTION:
        return value
    return draw.choice([n for n in range(value - 2, value + 4) if n >= 0 and n != value][:4])


def write_sums(folder: Path) -> None:
    """Write the inputs of the sums: a model large enough to memorise them."""
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_base_model(folder / "base", build_tokenizer([CHARACTERS], "."), max_position_embeddings=32, **shape)
    draw = random.Random(SEED)
    rows = [
        {"prompt": prompt, "chosen": str(taught_answer(value, draw))}
        for _ in range(COPIES)
        for prompt, value in sums()
    ]
    write_rows(folder / "sft.jsonl", rows)
    prompts = [{"prompt": prompt, "answer": str(value)} for prompt, value in sums()]
    write_rows(folder / "prompts.jsonl", prompts * 4)


# ---- word problems ------------------------------------------------------------------------------------

# Template: digits of each number of a question. The numbers are then at fixed positions, and a small model
# soon learns to copy them: with two templates and a correct teacher, 84 % of held-out answers were right
# after 750 steps, without this rule 9 %.
TEMPLATES = {39: (2, 2, 1, 1), 54: (3, 2, 2), 57: (2, 2, 2)}
NUM_PROBLEMS = {"sft": 12000, "prompts": 2048, "held_out": 256}
NUMBER = re.compile(r"\d+")
WORD = r"\n| ?[A-Za-z']+| ?\d| ?[^\w\s]"  # a token: a word, a digit or a mark, with the space before it


def load_template(number: int) -> Callable[[random.Random], dict[str, Any]]:
    """One of reasoning-gym's templates, without the packages that its other tasks need.

    Raises SystemExit if reasoning-gym is not installed.
    """
    spec = find_spec("reasoning_gym")
    if spec is None:
        raise SystemExit("gsm: its word problems are reasoning-gym's: pip install --no-deps reasoning-gym")
    # Not executed: its __init__ imports all tasks, which need eleven packages.
    package = module_from_spec(spec)
    package.__path__.append(f"{package.__path__[0]}/arithmetic/gsm_symbolic")
    sys.modules["reasoning_gym"] = package
    module = importlib.import_module(f"reasoning_gym.generators_{'00_49' if number < 50 else '50_99'}")
    return getattr(module, f"generate_{number}")


def problems(draw: random.Random) -> Iterator[Row]:
    """Endless problems, as prompt and answer; no two of a template have the same numbers."""
    templates = {number: load_template(number) for number in TEMPLATES}
    seen: set[tuple[int, tuple[str, ...]]] = set()
    while True:
        template = draw.choice(list(templates))
        problem = templates[template](draw)
        numbers = tuple(NUMBER.findall(problem["question"]))
        if tuple(map(len, numbers)) == TEMPLATES[template] and (template, numbers) not in seen:
            seen.add((template, numbers))
            yield {"prompt": problem["question"] + "\n", "answer": problem["metadata"]["answer_cot"]}


def taught_solution(solution: str, draw: random.Random) -> str:
    """The teacher's answer: the solution, or one that stops a step early with its intermediate result."""
    if draw.random() < RIGHT_FRACTION:
        return solution
    *steps, _, _ = solution.split("\n")  # the last step, and "#### answer"
    return "\n".join([*steps, f"#### {NUMBER.findall(steps[-1])[-1]}"])


def write_word_problems(folder: Path) -> None:
    """Write the inputs of the word problems: a model that can copy, add and subtract numbers."""
    draw = random.Random(SEED)
    source = problems(draw)
    rows = {name: [next(source) for _ in range(number)] for name, number in NUM_PROBLEMS.items()}
    texts = (text for part in rows.values() for row in part for text in row.values())
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8}
    shape |= {"initializer_range": 0.06, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    save_base_model(folder / "base", build_tokenizer(texts, WORD), max_position_embeddings=128, **shape)
    rows["sft"] = [row | {"answer": taught_solution(row["answer"], draw)} for row in rows["sft"]]
    for name, part in rows.items():
        write_rows(folder / f"{name}.jsonl", part)


LEVELS = {"sums": write_sums, "gsm": write_word_problems}

if __name__ == "__main__":
    folder, level = [*sys.argv[1:], "sums"][:2] if len(sys.argv) in (2, 3) else ("", "")
    if level not in LEVELS:
        raise SystemExit(__doc__)
    Path(folder).mkdir(parents=True, exist_ok=True)
    LEVELS[level](Path(folder))
