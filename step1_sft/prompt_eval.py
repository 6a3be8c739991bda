#!/usr/bin/env python
"""Answers of two models to the same prompts, side by side: the base model and the fine-tuned one.

python step1_sft/prompt_eval.py --model_name_or_path_baseline BASE --model_name_or_path_finetune OUT/export

The prompts are a few built-in questions, or those of --data_path.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common import distributed, startup
from common.args import REQUIRED, Problems, TokenizerArguments, flag, parse_args
from common.checkpoint import read_metadata
from common.data.example import Message
from common.data.registry import load_source
from common.dialogue import build_template
from common.generate import SamplingOptions, generate
from common.models import ModelOptions, load_causal_lm

NO_BEAMS = "answers are greedy or sampled (--num_return_sequences above 1), never searched with beams"
QUESTIONS = {
    "English": (
        "Please tell me about Microsoft in a few sentences.",
        "Explain the moon landing to a six year old in a few sentences.",
        "Write a short poem about a wise frog.",
        "Who was president of the United States in 1955?",
        "How does a telescope work?",
        "Why do birds migrate south for the winter?",
    ),
    "Chinese": (
        "请用几句话介绍一下微软。",
        "用几句话向六岁的孩子解释登月。",
        "写一首关于一只聪明的青蛙的短诗。",
    ),
    "Japanese": (
        "マイクロソフトについて簡単に教えてください。",
        "賢いカエルについて短い詩を書いてください。",
    ),
}


@dataclass
class PromptEvalArguments(TokenizerArguments):
    """Two models, some prompts."""

    model_name_or_path_baseline: str = flag(REQUIRED, "the model before: a folder or a hub name")
    model_name_or_path_finetune: str = flag(REQUIRED, "the model after: an export/ folder")
    data_path: str = flag("", "a data set whose first prompts are asked; empty: built-in questions")
    num_prompts: int = flag(6, "prompts asked at most")
    language: str = flag("English", "language of the built-in questions", choices=tuple(QUESTIONS))
    max_new_tokens: int = flag(100, "tokens of an answer at most")
    num_return_sequences: int = flag(1, "answers a prompt; more than one are sampled")
    top_k: int = flag(4, "samples come from the k likeliest tokens; 0: all")
    template: str = flag(
        "",
        "dialogue form; empty: what the model was trained with",
        choices=("human_assistant", "chat", "plain"),
    )
    dtype: str = flag("", "fp32, bf16 or fp16; empty: bf16 on a GPU that has it, else fp32")
    seed: int = flag(1234, "seed of the sampling")
    num_beams: int = flag(1, "accepted", no_effect=NO_BEAMS)
    num_beam_groups: int = flag(1, "accepted", no_effect=NO_BEAMS)
    penalty_alpha: float = flag(0.6, "accepted", no_effect="contrastive search left transformers")


def read_prompts(args: PromptEvalArguments) -> list[tuple[Message, ...]]:
    """Return the prompts: built-in questions, or the first ones of --data_path."""
    if not args.data_path:
        return [(Message("user", question),) for question in QUESTIONS[args.language]][: args.num_prompts]
    source = load_source(args.data_path)
    rows = (source.train[index] for index in range(len(source.train)))
    prompts = (
        example.prompt for row in rows for example in source.adapter.to_examples(row) if example.prompt
    )
    return [prompt for _, prompt in zip(range(args.num_prompts), prompts, strict=False)]


def answer_all(name: str, tokenizer: Any, prompts: list, args: PromptEvalArguments) -> list[list[str]]:
    """Return each prompt's answers by the model of that name."""
    template_name = args.template or read_metadata(args.model_name_or_path_finetune).get("template")
    template = build_template(template_name or "human_assistant", tokenizer)
    options = ModelOptions(name, dtype=args.dtype or distributed.default_dtype_name(), dropout=0.0)
    model = load_causal_lm(options, len(tokenizer)).to(distributed.device()).eval()
    sampling = SamplingOptions(
        max_new_tokens=args.max_new_tokens,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=len(tokenizer),
        top_k=args.top_k,
        do_sample=args.num_return_sequences > 1,
        seed=args.seed,
    )
    limit = getattr(model.config, "max_position_embeddings", None) or 4096
    answers = []
    for prompt in prompts:
        ids = template.encode(template.segments(prompt, None), max(limit - args.max_new_tokens, 8)).input_ids
        prompt_ids = torch.tensor([ids] * args.num_return_sequences, device=distributed.device())
        sample_ids = torch.arange(args.num_return_sequences, device=prompt_ids.device)
        result = generate(model, prompt_ids, torch.ones_like(prompt_ids), sample_ids, sampling)
        pairs = zip(result.response_ids, result.response_mask, strict=True)
        answers.append([tokenizer.decode(row[mask], skip_special_tokens=True).strip() for row, mask in pairs])
    return answers


def main() -> None:
    """Check, ask both models, print."""
    problems = Problems()
    args = parse_args(PromptEvalArguments, description=__doc__.splitlines()[0], problems=problems)
    startup.check_positive(args, ["max_new_tokens", "num_return_sequences", "num_prompts"], problems)
    problems.exit_if_any()
    tokenizers = {}
    for kind in ("baseline", "finetune"):
        flag_name, name = f"--model_name_or_path_{kind}", getattr(args, f"model_name_or_path_{kind}")
        if startup.check_model(flag_name, name, args, problems):
            tokenizers[kind] = startup.check_tokenizer(flag_name, name, args, problems)
    with startup.as_problem(problems):
        prompts = read_prompts(args)
    problems.exit_if_any()
    startup.print_notes(args)
    answers = {
        kind: answer_all(getattr(args, f"model_name_or_path_{kind}"), tokenizer, prompts, args)
        for kind, tokenizer in tokenizers.items()
    }
    for index, prompt in enumerate(prompts):
        print(f"\n{prompt[-1].content}")
        for kind in ("baseline", "finetune"):
            for text in answers[kind][index]:
                print(f"  {kind:>8}: {text}")


if __name__ == "__main__":
    startup.run_program(main)
