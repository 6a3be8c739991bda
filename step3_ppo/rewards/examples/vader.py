"""`--reward function:step3_ppo.rewards.examples.vader:sentiment`: how positive a response sounds."""

import functools

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


@functools.cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()  # reads its lexicon, hence the cache


def sentiment(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """VADER's compound score of each response, from -1 (hostile) to 1 (glad); 0 for an empty one."""
    return [_analyzer().polarity_scores(response)["compound"] for response in responses]
