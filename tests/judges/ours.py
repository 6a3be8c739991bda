"""What our own programs read in an export: the numbers that a judge should give."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from ask import NUM_NEW, Chats
from exports import Export

from common.data.example import Turn
from common.data.tokenizer import num_token_ids
from common.flags.args import Problems
from common.models.loading import ModelOptions
from common.models.model_inputs import build_model_inputs
from common.models.value_model import load_value_model
from serving.answering import Answerer, Sampling, load_answerer, load_template
from serving.arguments import AnsweringArguments


def turns(chat: Sequence[dict[str, str]]) -> list[Turn]:
    return [Turn(message["role"], message["content"]) for message in chat]


class OurReading:
    """Answers to the questions of ask.py, by the same names."""

    def __init__(self, export: Export, task: dict[str, Any]) -> None:
        self.export, self.task = export, task
        problems, args = Problems(), AnsweringArguments(dtype="fp32")
        is_ranker = export.kind == "reward"
        self.template = load_template("--path", str(export.folder), args, problems, is_ranker=is_ranker)
        assert self.template, problems.messages

    @cached_property
    def answerer(self) -> Answerer:
        args = AnsweringArguments(dtype="fp32")
        return load_answerer(str(self.export.folder), self.template, args, Sampling(NUM_NEW, temperature=0.0))

    def row(self, talk: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation with its last reply, as it is trained, and which are of the reply."""
        *prompt, reply = turns(talk)
        ends_replies = not self.template.keeps_headers
        segments = self.template.segments(prompt, reply, learn_all_turns=ends_replies)
        row = self.template.encode(segments, 10**6)
        closing = self.template.closing_ids
        return row.input_ids + closing, row.response_mask + [True] * len(closing)

    @property
    def sent(self) -> list[list[int]]:
        return [self.answerer.encode(turns(chat)) for chat in self.task["prompts"]]

    @property
    def said(self) -> list[str]:
        return [self.answerer.answer(turns(chat))[0] for chat in self.task["prompts"]]

    @cached_property
    def by_token(self) -> list[list[tuple[float, bool]]]:
        """Log-probability of each token of a talk after the first, and whether it is of the reply."""
        rows = [self.row(talk) for talk in self.task["talks"]]
        scores = [[score.logprob for score in self.answerer.score(ids, 1)[1:]] for ids, _ in rows]
        return [list(zip(some, mask[1:], strict=True)) for some, (_, mask) in zip(scores, rows, strict=True)]

    @property
    def logprobs(self) -> list[float]:
        return [sum(logprob for logprob, _ in row) for row in self.by_token]

    @property
    def loss(self) -> float:
        learnt = [logprob for row in self.by_token for logprob, is_learnt in row if is_learnt]
        return -sum(learnt) / len(learnt)

    @property
    def logps(self) -> float:
        return sum(logprob for row in self.by_token for logprob, is_learnt in row if is_learnt) / len(
            self.by_token
        )

    @property
    def scores(self) -> list[float]:
        return self.score(self.task["talks"])

    @property
    def mean_score(self) -> float:
        scores = self.score(self.task["talks"] + self.task["worse"])
        return sum(scores) / len(scores)

    def score(self, talks: Chats) -> list[float]:
        """Scores of a reward model."""
        tokenizer = self.template.tokenizer
        model = load_value_model(ModelOptions(str(self.export.folder), dropout=0.0), num_token_ids(tokenizer))
        rows = [torch.tensor(self.row(talk)[0]) for talk in talks]
        inputs = build_model_inputs(torch.cat(rows), torch.tensor([*map(len, rows)]), is_packed=False)
        with torch.no_grad():
            return model.eval()(inputs, inputs.last_slots).tolist()
