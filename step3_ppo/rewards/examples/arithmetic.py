"""`--reward function:step3_ppo.rewards.examples.arithmetic:right_answer`: a rule whose answer can be checked.

The right answer is the row's field `answer` (what follows "####" where it has that, as in GSM8K), else the
value of the last "12 + 7 =" in the prompt.
"""

import ast
import operator
import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
_TERM = r"[(\-]*\d+(?:\.\d+)?\)*"
_EXPRESSION = re.compile(rf"{_TERM}(?:[ \t]*[+\-*/][ \t]*{_TERM})+(?=[ \t]*=)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def right_answer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """Return 1 where the first number of a response is the right answer, else 0.

    Raises:
        ValueError: a row has no number as `answer`, and the prompt no sum.
    """
    expected = [find_answer(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
    return [
        float(first_number(response) == answer) for response, answer in zip(responses, expected, strict=True)
    ]


def first_number(text: str) -> Fraction | None:
    """Return the first number of a text, such as 1,234 or -3.5; None where there is none."""
    found = _NUMBER.search(text)
    return Fraction(found[0].replace(",", "")) if found else None


def find_answer(prompt: str, row: dict) -> Fraction:
    """Return the right answer to a prompt. Raises ValueError."""
    if row.get("answer") is not None:
        answer = first_number(str(row["answer"]).rpartition("####")[2])
        if answer is None:
            raise ValueError(f"the field answer, {row['answer']!r}, holds no number; correct the data")
        return answer
    expressions = _EXPRESSION.findall(prompt)
    if not expressions:
        raise ValueError(
            f"the prompt {prompt!r} has no sum such as 12 + 7 =, and its row no field called answer; give "
            "the data one of the two"
        )
    return evaluate(expressions[-1])


def evaluate(expression: str) -> Fraction:
    """Return the exact value of numbers joined by + - * / and parentheses; nothing else is run.

    Raises:
        ValueError: it is anything else, or divides by zero.
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"{expression.strip()!r} has no value: {error}") from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))  # 0.1 is a tenth here
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(f"{ast.unparse(node)!r} is no sum of numbers")
