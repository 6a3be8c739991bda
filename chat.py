#!/usr/bin/env python
"""Talk to a saved model in the terminal.

python chat.py --path output/step3/export
An empty line or Ctrl-D leaves, `clear` forgets what was said.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from common import distributed, startup
from common.args import REQUIRED, Problems, TokenizerArguments, flag, parse_args
from common.checkpoint import read_metadata
from common.data.example import Message
from common.dialogue import Template, build_template
from common.generate import SamplingOptions, generate
from common.models import ModelOptions, load_causal_lm


@dataclass
class ChatArguments(TokenizerArguments):
    """A conversation."""

    path: str = flag(REQUIRED, "the model: an export/ folder, or a hub name")
    template: str = flag(
        "",
        "dialogue form; empty: what the model was trained with",
        choices=("human_assistant", "chat", "plain"),
    )
    max_new_tokens: int = flag(128, "tokens of an answer at most")
    temperature: float = flag(0.7, "sampling temperature; 0 takes the likeliest token")
    top_k: int = flag(0, "sample from the k likeliest tokens only; 0: all")
    top_p: float = flag(0.95, "sample from the smallest set of tokens with this probability")
    dtype: str = flag("", "fp32, bf16 or fp16; empty: bf16 on a GPU that has it, else fp32")
    seed: int = flag(1234, "seed of the sampling")


class Conversation:
    """What was said so far, and the model that answers."""

    def __init__(self, model: Any, tokenizer: Any, template: Template, options: SamplingOptions) -> None:
        self.model, self.tokenizer, self.template, self.options = model, tokenizer, template, options
        self.messages: list[Message] = []
        self.num_answers = 0

    def answer(self, text: str) -> str:
        """Return the answer to the next message; the oldest turns are left out when room runs short."""
        self.messages.append(Message("user", text))
        limit = getattr(self.model.config, "max_position_embeddings", None) or 4096
        room = max(limit - self.options.max_new_tokens, 8)
        segments = self.template.segments(tuple(self.messages), None)
        ids = self.template.encode(segments, room).input_ids
        prompt_ids = torch.tensor([ids], device=distributed.device())
        sample_ids = torch.tensor([self.num_answers], device=prompt_ids.device)
        self.num_answers += 1
        result = generate(self.model, prompt_ids, torch.ones_like(prompt_ids), sample_ids, self.options)
        reply_ids = result.response_ids[0][result.response_mask[0]]
        reply = self.tokenizer.decode(reply_ids, skip_special_tokens=True).strip()
        self.messages.append(Message("assistant", reply))
        return reply

    def clear(self) -> None:
        """Forget what was said."""
        self.messages = []


def load_conversation(args: ChatArguments) -> Conversation:
    """Return a conversation with the model of --path, or leave with one message."""
    problems = Problems()
    startup.check_model("--path", args.path, args, problems)
    tokenizer = None if problems.messages else startup.check_tokenizer("--path", args.path, args, problems)
    problems.exit_if_any()
    name = args.template or read_metadata(args.path).get("template", "human_assistant")
    with startup.as_problem(problems):
        template = build_template(name, tokenizer)
    model_options = ModelOptions(args.path, dtype=args.dtype or distributed.default_dtype_name(), dropout=0.0)
    model = load_causal_lm(model_options, len(tokenizer)).to(distributed.device()).eval()
    options = SamplingOptions(
        max_new_tokens=args.max_new_tokens,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=len(tokenizer),
        temperature=args.temperature or 1.0,
        top_k=args.top_k,
        top_p=args.top_p,
        do_sample=args.temperature > 0,
        seed=args.seed,
    )
    return Conversation(model, tokenizer, template, options)


def main() -> None:
    """Read a line, answer it, until there is none."""
    problems = Problems()
    args = parse_args(ChatArguments, description=__doc__.splitlines()[0], problems=problems)
    startup.check_positive(args, ["max_new_tokens", "top_p"], problems)
    problems.exit_if_any()
    conversation = load_conversation(args)
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            text = input("you> " if is_terminal else "").strip()
        except EOFError:
            text = ""
        if not text:
            return
        if text == "clear":
            conversation.clear()
            continue
        print(f"bot> {conversation.answer(text)}", flush=True)


if __name__ == "__main__":
    startup.run_program(main)
