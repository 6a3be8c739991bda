#!/usr/bin/env python
"""Inputs of a task whose answers can be checked: sums of two digits, learned from a careless teacher.

python training_scripts/verifiable/build_inputs.py OUT

OUT/base is a random Llama of two layers with a tokenizer of single characters, OUT/sft.jsonl has sums of
which the teacher got 40 % right, OUT/prompts.jsonl the sums alone. An SFT model is thus right about as often
as its teacher; the reward is 1 for a right answer, and an algorithm has to find out which those are.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+= "
RIGHT_FRACTION = 0.4
COPIES = 40  # times that each sum comes in the SFT data
SEED = 7


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a character; <eos> ends a turn, <pad> is another token."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def save_base_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a random model that is large enough for a table of sums."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sums() -> list[tuple[str, int]]:
    """Return every sum of two digits with its value."""
    return [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]


def taught_answer(value: int, draw: random.Random) -> int:
    """Return what the teacher says: the value, or one of four numbers beside it."""
    if draw.random() < RIGHT_FRACTION:
        return value
    return draw.choice([n for n in range(value - 2, value + 4) if n >= 0 and n != value][:4])


def write_rows(file: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Write everything into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_base_model(folder / "base", build_tokenizer())
    draw = random.Random(SEED)
    rows = [
        {"prompt": prompt, "chosen": str(taught_answer(value, draw))}
        for _ in range(COPIES)
        for prompt, value in sums()
    ]
    write_rows(folder / "sft.jsonl", rows)
    prompts = [{"prompt": prompt, "answer": str(value)} for prompt, value in sums()]
    write_rows(folder / "prompts.jsonl", prompts * 4)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
