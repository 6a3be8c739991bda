"""The arena's rules: two models answer a prompt without their names, a person judges, then names are told."""

import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from common.data.example import BadRow, Message
from common.data.registry import RawSource
from common.ranks.failures import kind_and_line
from serving.answering import Answerer, Sampling
from serving.judgement_store import JudgementStore, Pair, Refused
from serving.win_rates import Outcome, duels, ratings

Emit = Callable[[dict[str, Any]], None]
Prompts = Iterator[tuple[Sequence[Message], str]]
_SCORES = {"a": 1.0, "b": 0.0, "tie": 0.5, "both_bad": 0.5}


def draw_prompts(source: RawSource, generator: random.Random) -> Prompts:
    """Yield the prompts of a data set and where they come from, in random order, each once before any comes
    again; other rows are skipped. Raises ValueError when there is none.
    """
    rows, num_found = source.train, 1
    while num_found:
        num_found = 0
        for index in generator.sample(range(len(rows)), len(rows)):
            try:
                examples = source.adapter.to_examples(rows[index])
            except BadRow:
                continue
            prompt = next((example.prompt for example in examples if example.prompt), None)
            if prompt:
                num_found += 1
                yield prompt, rows.row_id(index)
    raise ValueError(f"--data_path {source.name} has no prompts; give a data set of questions")


class BlindPairs:
    """Asks models in pairs, keeps what they answer and what people think of it."""

    def __init__(
        self,
        models: Mapping[str, Answerer],
        store: JudgementStore,
        sampling: Sampling,
        *,
        prompts: Prompts | None = None,
        generator: random.Random | None = None,
    ) -> None:
        """`models` by name; `prompts` of --data_path; `generator` chooses and shuffles the models."""
        self.models, self.store, self.sampling, self.prompts = models, store, sampling, prompts
        self._generator = generator or random.SystemRandom()
        self._prompts_lock = threading.Lock()

    # ---- asking

    def ask(self, text: str) -> Pair:
        """Return a new pair for a typed prompt. Raises Refused."""
        return self._create([Message("user", _checked(text))], "typed", self._choose_models())

    def ask_drawn(self) -> Pair:
        """Return a new pair for a prompt of the data set. Raises Refused."""
        if self.prompts is None:
            raise Refused("the server was started without --data_path, so there are no prompts to draw")
        with self._prompts_lock:
            prompt, source = next(self.prompts)
        return self._create(prompt, source, self._choose_models())

    def follow_up(self, pair_id: str, text: str) -> Pair:
        """Return a new pair of the same two models that goes on from the preferred answer, A after a tie.

        Raises Refused.
        """
        before = self.store.get(pair_id)
        if before.choice not in ("a", "b", "tie"):
            raise Refused("a conversation goes on from an answer that was preferred; begin a new one")
        models = [before.model_a, before.model_b]
        if missing := [name for name in models if name not in self.models]:
            raise Refused(f"{missing[0]} is not served any more; begin a new conversation")
        self._generator.shuffle(models)
        answer = before.answer_b if before.choice == "b" else before.answer_a
        said = [*before.prompt, Message("assistant", answer or ""), Message("user", _checked(text))]
        return self._create(said, "follow-up", models)

    def _choose_models(self) -> list[str]:
        """Return two models in random order, of those that have met least often."""
        if len(self.models) < 2:
            raise Refused("the server has one model only, which cannot be compared; start it with two")
        met = self.store.num_answered_by_models()
        pairs = list(itertools.combinations(self.models, 2))
        least = min(met[frozenset(pair)] for pair in pairs)
        chosen = list(self._generator.choice([pair for pair in pairs if met[frozenset(pair)] == least]))
        self._generator.shuffle(chosen)
        return chosen

    def _create(self, prompt: Sequence[Message], source: str, names: list[str]) -> Pair:
        for name in names:
            try:
                reason = self.models[name].why_too_long(self.models[name].encode(prompt))
            except ValueError as error:
                reason = str(error)
            if reason:  # names stay hidden: the person may write another prompt for the same two
                raise Refused(f"one of the models cannot be asked: {reason}")
        return self.store.add_pair(prompt, source, *names, asdict(self.sampling))

    # ---- answering

    def answer(self, pair: Pair, emit: Emit, is_gone: threading.Event) -> None:
        """Let both models answer, one after the other, and tell all of it; stop when nobody listens any more.

        An answer is kept as soon as it is whole. Whatever goes wrong with a model is told and kept, too.
        """
        emit({"event": "pair"} | self.view(pair))
        for side, name in (("a", pair.model_a), ("b", pair.model_b)):
            model = self.models[name]

            def tell(_: int, text: str, side: str = side) -> bool:
                emit({"event": "text", "side": side, "text": text})
                return is_gone.is_set()

            try:
                [[answer]] = model.respond([model.encode(pair.prompt)], self.sampling, on_text=tell)
                if is_gone.is_set():
                    return
                self.store.set_answer(pair.id, side, answer.text)
                emit({"event": "end", "side": side, "text": answer.text, "finish": answer.finish_reason})
            except Exception as error:  # a device's, a library's, the disk's: the person must hear of each
                message = kind_and_line(error)
                print(f"error: {name} gave no answer: {message}", file=sys.stderr, flush=True)
                self.store.set_answer(pair.id, side, None, message)
                for hidden in sorted(self.models, key=len, reverse=True):
                    message = message.replace(hidden, "the model")
                emit({"event": "error", "side": side, "message": message})
        emit({"event": "done", "is_answered": self.store.get(pair.id).is_answered})

    # ---- judging

    def judge(self, pair_id: str, choice: str) -> dict[str, Any]:
        """Keep a judgement and return the pair with its names. Raises Refused."""
        return self.view(self.store.judge(pair_id, choice))

    def view(self, pair: Pair) -> dict[str, Any]:
        """Return what a page may know of a pair: names only after it was judged."""
        shown = {
            "id": pair.id,
            "prompt": [message._asdict() for message in pair.prompt],
            "answers": {"a": pair.answer_a, "b": pair.answer_b},
            "choice": pair.choice,
        }
        if pair.choice:
            shown["models"] = {"a": pair.model_a, "b": pair.model_b}
        return shown

    def results(self) -> dict[str, Any]:
        """Return ratings, duels and counts of all judgements in the database."""
        pairs = self.store.judged()
        outcomes = [Outcome(pair.model_a, pair.model_b, _SCORES[pair.choice or ""]) for pair in pairs]
        return {
            "num_judgements": len(pairs),
            "choices": Counter(pair.choice for pair in pairs),
            "ratings": [row._asdict() for row in ratings(outcomes)],
            "duels": [row._asdict() | {"first_rate": row.first_rate._asdict()} for row in duels(outcomes)],
        }


def _checked(text: str) -> str:
    """Return a prompt without the white space around it. Raises Refused."""
    if not text.strip():
        raise Refused("the prompt is empty; write something")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise Refused("the prompt holds half a character (a lone surrogate); write it anew") from error
    return text.strip()
