#!/usr/bin/env python
"""Answers of two or three models to the same prompts, side by side: base, SFT and PPO.

python serving/prompt_eval.py --model_name_or_path_baseline BASE --model_name_or_path_finetune SFT/export \\
    --model_name_or_path_rlhf PPO/export

The prompts are a few built-in questions, or those of --data_path.
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.data.dialogue import Template
from common.data.example import Message
from common.data.plugins import import_plugins
from common.data.registry import load_source
from common.flags.args import REQUIRED, Problems, flag, parse_args
from common.programs import startup
from serving.answering import AnsweringArguments, load_answerer, load_template

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
class PromptEvalArguments(AnsweringArguments):
    """Two models or three, some prompts."""

    model_name_or_path_baseline: str = flag(REQUIRED, "the model before: a folder or a hub name")
    model_name_or_path_finetune: str = flag(REQUIRED, "the model after: an export/ folder")
    model_name_or_path_rlhf: str = flag("", "the model after step 3: an export/ folder; empty: two models")
    plugins: list[str] = flag([], "modules to import first: the data sets that they register can be named")
    data_path: str = flag("", "a data set whose first prompts are asked; empty: built-in questions")
    num_prompts: int = flag(6, "prompts asked at most", low=1)
    language: str = flag("English", "language of the built-in questions", choices=tuple(QUESTIONS))
    max_new_tokens: int = flag(100, "tokens of an answer at most", low=1)
    num_return_sequences: int = flag(1, "answers a prompt; more than one are sampled", low=1)
    top_k: int = flag(4, "samples come from the k likeliest tokens; 0: all", low=0)
    seed: int = flag(1234, "seed of the sampling", low=-(2**32), high=2**32)


def read_prompts(args: PromptEvalArguments) -> list[tuple[Message, ...]]:
    """Return the prompts: built-in questions, or the first ones of --data_path.

    Raises:
        ValueError: --data_path is no data set, has a row that cannot be read, or no prompt.
    """
    if not args.data_path:
        return [(Message("user", question),) for question in QUESTIONS[args.language]][: args.num_prompts]
    source = load_source(args.data_path)
    rows = (source.train[index] for index in range(len(source.train)))
    prompts = (
        example.prompt for row in rows for example in source.adapter.to_examples(row) if example.prompt
    )
    found = list(itertools.islice(prompts, args.num_prompts))
    if not found:
        raise ValueError(f"--data_path {args.data_path} has no prompts; give a data set of questions")
    return found


def models_of(args: PromptEvalArguments) -> dict[str, str]:
    """Return the models that are compared, by the last word of their flags."""
    models = {
        "baseline": args.model_name_or_path_baseline,
        "finetune": args.model_name_or_path_finetune,
        "rlhf": args.model_name_or_path_rlhf,
    }
    return {kind: path for kind, path in models.items() if path or kind != "rlhf"}


def load_templates(args: PromptEvalArguments, problems: Problems) -> dict[str, Template]:
    """Return each model's template, of the form that the fine-tuned model was trained with."""
    found, trained_path = {}, args.model_name_or_path_finetune
    for kind, path in models_of(args).items():
        flag = f"--model_name_or_path_{kind}"
        template = load_template(flag, path, args, problems, trained_path=trained_path)
        if template:
            found[kind] = template
    return found


def answer_all(
    path: str, template: Template, prompts: list[tuple[Message, ...]], args: PromptEvalArguments
) -> list[list[str]]:
    """Return each prompt's answers by the model of `path`, which is loaded for it and dropped again."""
    answerer = load_answerer(
        path,
        template,
        args,
        max_new_tokens=args.max_new_tokens,
        top_k=args.top_k,
        do_sample=args.num_return_sequences > 1,
        seed=args.seed,
    )
    return answerer.answer(prompts, num_samples=args.num_return_sequences)


def main() -> None:
    """Check, ask all models, print."""
    problems = Problems()
    args = parse_args(PromptEvalArguments, description=__doc__.splitlines()[0], problems=problems)
    import_plugins(args.plugins, problems)
    problems.exit_if_any()
    templates = load_templates(args, problems)
    try:
        prompts = read_prompts(args)
        for prompt, template in itertools.product(prompts, templates.values()):
            template.prompt_text(prompt)  # a chat template may refuse a dialogue
    except ValueError as error:
        problems.add(str(error))
    problems.exit_if_any()
    startup.print_notes(args)
    with startup.as_problem(problems):
        models = models_of(args)
        answers = {
            kind: answer_all(models[kind], template, prompts, args) for kind, template in templates.items()
        }
    for index, prompt in enumerate(prompts):
        print(f"\n{prompt[-1].content}")
        for kind in answers:
            for text in answers[kind][index]:
                print(f"  {kind:>8}: {text}")


if __name__ == "__main__":
    startup.run_program(main)
