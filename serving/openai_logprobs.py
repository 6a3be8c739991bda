"""Log-probabilities in OpenAI's two forms: those of chat completions and those of completions."""

from typing import Any

from serving.answering import Answer
from serving.served_models import ServedModel


def chat_logprobs(model: ServedModel, prompt_ids: list[int], answer: Answer, num_top: int) -> dict[str, Any]:
    """Return the log-probabilities of an answer's tokens, the end of turn included."""
    scores = model.score([*prompt_ids, *answer.token_ids], num_top)[len(prompt_ids) - 1 :]
    content = [
        _entry(model, token_id, score.logprob) | {"top_logprobs": [_entry(model, *one) for one in score.top]}
        for token_id, score in zip(answer.token_ids, scores, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(model: ServedModel, token_id: int, logprob: float) -> dict[str, Any]:
    text = model.token_text(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(
    model: ServedModel, prompt_ids: list[int], answer: Answer, num_top: int, *, echo: bool
) -> dict[str, Any]:
    """Return the log-probabilities of an answer's tokens, after those of its prompt with `echo`.

    The very first token of all has none. `text_offset` counts characters of the tokens' own texts.
    """
    whole = [*prompt_ids, *answer.token_ids]
    scores = [None, *model.score(whole, num_top)] if len(whole) > 1 else [None]
    first = 0 if echo else len(prompt_ids)
    shown, scores = whole[first:], scores[first:]
    texts = [model.token_text(token_id) for token_id in shown]
    offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
    top = [s and {model.token_text(token_id): logprob for token_id, logprob in s.top} for s in scores]
    return {
        "tokens": texts,
        "token_logprobs": [score and score.logprob for score in scores],
        "top_logprobs": top if num_top else None,
        "text_offset": offsets,
    }
