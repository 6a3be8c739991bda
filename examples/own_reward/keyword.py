"""A reward that checks a request in the prompt, using other fields of the row."""

MAX_WORDS = 30


def says_keyword(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """1 for a response that contains its row's `keyword`, less 0.1 for each word beyond MAX_WORDS."""
    return [
        float(row["keyword"].lower() in response.lower()) - 0.1 * max(len(response.split()) - MAX_WORDS, 0)
        for response, row in zip(responses, rows, strict=True)
    ]
