"""Two environments: a calculator that the model may use before it answers, and a number-guessing game."""

import re


class Calculator:
    """A reply that is a sum, such as 12+30, is answered by its value; any other is the model's answer."""

    max_turns = 2

    def reset(self, row: dict) -> list[dict]:
        """Begin with the row's own prompt; `answer` is the right one."""
        self.answer = str(row["answer"])
        return row["messages"]

    def step(self, messages: list[dict]) -> tuple[list[dict], float, bool]:
        """Return the value of a sum, or 1 for the right answer."""
        reply = messages[-1]["content"].strip()
        if call := re.fullmatch(r"(\d{1,9}) ?\+ ?(\d{1,9})", reply):
            value = int(call[1]) + int(call[2])
            return [{"role": "user", "content": str(value)}], 0.0, False
        return [], float(reply == self.answer), True


class HigherOrLower:
    """After each guess the model is told where the number lies; a hit is worth more, the earlier it comes."""

    max_turns = 3
    higher, lower = "higher", "lower"

    def reset(self, row: dict) -> list[dict]:
        """Begin with the row's own prompt; `number` is to be guessed."""
        self.number = int(row["number"])
        self.num_guesses = 0
        return row["messages"]

    def step(self, messages: list[dict]) -> tuple[list[dict], float, bool]:
        """Return a hint, or the share of the guesses that were not needed, the last one counted in."""
        self.num_guesses += 1
        guess = re.search(r"\d+", messages[-1]["content"])
        if guess and int(guess[0]) == self.number:
            return [], 1 - (self.num_guesses - 1) / self.max_turns, True
        hint = self.higher if guess is None or int(guess[0]) < self.number else self.lower
        return [{"role": "user", "content": hint}], 0.0, False
