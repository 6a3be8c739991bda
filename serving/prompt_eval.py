#!/usr/bin/env python
"""Shows the responses of two or three models (base, SFT, PPO) to the same prompts side by side.

python serving/prompt_eval.py --model_name_or_path_baseline BASE --model_name_or_path_finetune SFT/export \
    --model_name_or_path_rlhf PPO/export

The prompts are a few built-in questions, or those of --data_path.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import REQUIRED, Problems, begin_tool, flag, parse_args
from serving.arguments import AnsweringArguments

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
    """Models, prompts and sampling."""

    model_name_or_path_baseline: str = flag(REQUIRED, "baseline model: a folder or a hub name")
    model_name_or_path_finetune: str = flag(REQUIRED, "fine-tuned model: an export/ folder")
    model_name_or_path_rlhf: str = flag("", "model of step 3: an export/ folder; empty: compare only two")
    plugins: list[str] = flag([], "Python modules to import first, to register data sets")
    data_path: str = flag("", "data set whose first prompts are used; empty: built-in questions")
    num_prompts: int = flag(6, "maximum number of prompts", low=1)
    language: str = flag("English", "language of the built-in questions", choices=tuple(QUESTIONS))
    max_new_tokens: int = flag(100, "maximum tokens of a response", low=1)
    num_return_sequences: int = flag(1, "responses per prompt; 1: greedy, more: sampled", low=1)
    top_k: int = flag(4, "sample from the k likeliest tokens only; 0: all", low=0)
    seed: int = flag(1234, "seed of the sampling", low=-(2**32), high=2**32)


if __name__ == "__main__":
    begin_tool(PromptEvalArguments, __doc__)

from common.data.example import Message
from common.flags.plugins import import_plugins
from common.programs import running, startup
from serving.answering import Sampling, load_answerer, load_template, read_prompts


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, prompt all models, print the responses. `argv` defaults to sys.argv[1:]."""
    problems = Problems()
    args = parse_args(PromptEvalArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    import_plugins(args.plugins, problems)
    problems.exit_if_any()
    trained = args.model_name_or_path_finetune  # its prompt format is used for all models
    models = {"baseline": args.model_name_or_path_baseline, "finetune": trained}
    if args.model_name_or_path_rlhf:
        models["rlhf"] = args.model_name_or_path_rlhf
    templates = {}
    for kind, path in models.items():
        flag_name = f"--model_name_or_path_{kind}"
        if template := load_template(flag_name, path, args, problems, trained_path=trained):
            templates[kind] = template
    prompts = [(Message("user", question),) for question in QUESTIONS[args.language]][: args.num_prompts]
    with problems.catch():
        if args.data_path:
            rows = itertools.islice(read_prompts(args.data_path), args.num_prompts)
            prompts = [prompt for prompt, _ in rows]
        for prompt, template in itertools.product(prompts, templates.values()):
            template.prompt_text(prompt)  # a chat template may reject a conversation
    problems.exit_if_any()
    startup.print_notes(args, argv)
    sampling = Sampling(
        args.max_new_tokens,
        temperature=1.0 if args.num_return_sequences > 1 else 0.0,
        top_k=args.top_k,
        num_answers=args.num_return_sequences,
    )
    answers = {}
    with startup.as_problem(problems):
        for kind, template in templates.items():
            answerer = load_answerer(models[kind], template, args, sampling, seed=args.seed)
            answers[kind] = [answerer.answer(prompt) for prompt in prompts]
            del answerer  # frees its memory for the next model
    for index, prompt in enumerate(prompts):
        print(f"\n{prompt[-1].content}")
        for kind in answers:
            for text in answers[kind][index]:
                print(f"  {kind:>8}: {text}")


if __name__ == "__main__":
    running.run_program(main, shows_progress=False)
