"""Two environments: a calculator that the model may use before its answer, and a number-guessing game."""

import re


class Calculator:
    """Replies to a sum, such as 12+30, with its value; any other text is the model's answer."""

    max_turns = 2

    def reset(self, row: dict) -> list[dict]:
        """Start with the row's own prompt; `answer` is the right one."""
        self.answer = str(row["answer"])
        return row["messages"]

    def step(self, messages: list[dict]) -> tuple[list[dict], float, bool]:
        """The value of a sum, or a reward of 1 for the right answer and 0 for any other."""
        reply = messages[-1]["content"].strip()
        if call := re.fullmatch(r"(\d{1,9}) ?\+ ?(\d{1,9})", reply):
            value = int(call[1]) + int(call[2])
            return [{"role": "user", "content": str(value)}], 0.0, False
        return [], float(reply == self.answer), True


class HigherOrLower:
    """Replies to each guess with "higher" or "lower"; an earlier hit has a higher reward."""

    max_turns = 3
    higher, lower = "higher", "lower"

    def reset(self, row: dict) -> list[dict]:
        """Start with the row's own prompt; `number` is to be guessed."""
        self.number = int(row["number"])
        self.num_guesses = 0
        return row["messages"]

    def step(self, messages: list[dict]) -> tuple[list[dict], float, bool]:
        """A hint, or for a hit the reward: 1 at the first guess, less 1 / max_turns for each further one."""
        self.num_guesses += 1
        guess = re.search(r"\d+", messages[-1]["content"])
        if guess and int(guess[0]) == self.number:
            return [], 1 - (self.num_guesses - 1) / self.max_turns, True
        hint = self.higher if guess is None or int(guess[0]) < self.number else self.lower
        return [{"role": "user", "content": hint}], 0.0, False
