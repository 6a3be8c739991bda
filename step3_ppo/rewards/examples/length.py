"""`--reward function:step3_ppo.rewards.examples.length:brevity`: a penalty for long responses.

Add it to a reward for content: `--reward model:PATH 0.5*function:...`.
"""

NUM_FREE_WORDS = 100


def brevity(
    prompts: list[str], responses: list[str], rows: list[dict], num_free_words: int = NUM_FREE_WORDS
) -> list[float]:
    """0 for up to `num_free_words` words, then falling: -1 at twice as many, -2 at three times."""
    return [-max(len(response.split()) - num_free_words, 0) / num_free_words for response in responses]
