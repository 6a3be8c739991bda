"""Bad rows and files, by whole programs: a line a case, each refused by name before anything is trained."""

import gzip
import json
from typing import Any, NamedTuple

import pytest
from tiny_inputs import step_flags

pytestmark = [pytest.mark.slow]

DONE, BAD = 0, 2
Q = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
B = {"role": "assistant", "content": "b"}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
SAID = {"prompt": "q", "answer": "a"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
OBJECT = [{"answer": "a", "score": 1}]


class Case(NamedTuple):
    """What is wrong in a file of rows, and what the program says of it."""

    form: str
    wrong: str
    step: int
    content: Any  # a row, several, or the bytes of the file
    word: str
    code: int = BAD
    name: str = "rows.jsonl"


def chat(*turns: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(turns)} | columns


CASES = [
    # form, what is wrong, step, rows, the word
    Case("messages", "half a weight", 1, chat(Q, A | {"weight": 0.5}), "['weight'] is 0.5"),
    Case("messages", "train maybe", 1, chat(Q, A | {"train": "maybe"}), "['train'] is 'maybe'"),
    Case("messages", "all masked", 1, chat(Q, A | {"masked": 1}), "marked as context"),
    Case("messages", "an empty reply", 1, chat(Q, A | {"content": " "}), "assistant has no text"),
    Case("messages", "an empty question", 1, chat(Q | {"content": ""}, A), "user has no text"),
    Case("messages", "a null reply", 1, chat(Q, A | {"content": None}), "assistant has no text"),
    Case("messages", "no reply", 1, chat(Q), "`messages` ends with a turn of the user"),
    Case("messages", "the user is last", 1, chat(Q, A, Q), "ends with a turn of the user"),
    Case("messages", "a reply alone", 1, chat(A), "no turn before its only turn"),
    Case("messages", "an image", 1, chat(Q | {"content": [{"type": "image"}]}, A), "'image'"),
    Case("messages", "half a part masked", 1, chat(Q, A | {"content": [{"text": "a", "train": False}]}),
         "is not text; give text only"),
    Case("messages", "content is an object", 1, chat(Q | {"content": {"a": 1}}, A), "type dict, not text"),
    Case("messages", "no role", 1, chat({"content": "q"}, A), "has None in 'role'"),
    Case("messages", "no content", 1, chat({"role": "user", "contents": "q"}, A), "no text in 'content'"),
    Case("messages", "role is a number", 1, chat(Q | {"role": 3}, A), "has 3 in 'role'"),
    Case("messages", "role is unknown", 1, chat(Q | {"role": "narrator"}, A), "has 'narrator' in 'role'"),
    Case("messages", "two contents", 1, chat(Q | {"value": "p"}, A), "which differ"),
    Case("messages", "a turn is a text", 1, chat("q", A), "messages[0] is of type str"),
    Case("messages", "not a list", 1, {"messages": "q"}, "'messages' is of type str"),
    Case("messages", "an empty list", 1, {"messages": []}, "'messages' is empty"),
    Case("messages", "a call without a name", 1, chat(Q, CALLED | {"tool_calls": [{"id": 1}]}, A),
         "name of a function"),
    Case("messages", "a call that is no JSON", 1, chat(Q, CALLED | {"tool_calls": "f()"}, A), "not JSON"),
    Case("messages", "a thought is a list", 1, chat(Q, A | {"reasoning": ["t"]}),
         "reasoning_content is of type list"),
    Case("messages", "tools in a turn", 1, chat(Q | {"tools": "[{}]"}, A), "a column `tools`"),
    Case("messages", "spans of a turn", 1, chat(Q, A | {"train_detail": [1]}), "'train_detail'"),
    Case("messages", "two system messages", 1, chat({"role": "system", "content": "s"}, Q, A, system="t"),
         "'system' differs"),
    Case("messages", "a picture beside", 1, chat(Q, A, images=["a.png"]), "'images' cannot be used"),
    Case("messages", "tools are no tools", 1, chat(Q, A, tools=[{"x": 1}]), "name of a function"),
    Case("messages", "a label of a masked reply", 1, chat(Q, A | {"weight": 0}, label=True),
         "marked as context"),
    Case("conversations", "a list of texts", 1, {"conversations": ["q", "a"]},
         "conversations[0] is of type str"),
    Case("conversations", "no from", 1, {"conversations": [{"value": "q"}]}, "has None in 'role'"),
    Case("instruction/output", "history is a text", 1, {"instruction": "q", "output": "a", "history": "p"},
         "'history' is of type str"),
    Case("instruction/output", "history in threes", 1, {"instruction": "q", "output": "a", "history": [["p",
         "o", "n"]]}, "history[0]"),
    Case("instruction/output", "an empty answer before", 1, {"instruction": "q", "output": "a",
         "history": [["p", ""]]}, "assistant has no text"),
    Case("instruction/output", "output is a number", 1, {"instruction": "q", "output": 3},
         "'output' is of type int"),
    Case("instruction/output", "two requests", 1, {"instruction": "p", "question": "q", "output": "a"},
         "name the one to ask"),
    Case("question/answer", "no answer", 1, {"question": "q", "level": 1},
         "`question` and `level`, but no `response`"),
    Case("prompt/response", "a label of its own", 1, {"prompt": "q", "response": "a", "label": "sports"},
         "label 'sports'"),
    Case("prompt/response", "a bad answer", 1, {"prompt": "q", "response": "a", "label": "False "},
         "its label is false"),
    Case("prompt/response", "half a weight", 1, SAID | {"weight": 0.5}, "its weight is 0.5"),
    Case("prompt/completion", "the user is last", 1, {"prompt": [Q], "completion": [A, Q]},
         "ends with a turn of the user"),
    Case("prompt/completion", "another question", 1, {"prompt": "p", "completion": [Q, A]},
         "turns before the reply"),
    Case("prompt/completions/labels", "steps, SFT", 1, {"prompt": "q", "completions": ["a"],
         "labels": [True]}, "not an answer with its rank or score"),
    Case("prompt/completions/labels", "steps, PPO", 3, {"prompt": "q", "completions": ["a"],
         "labels": [True]}, "not an answer with its rank or score"),
    Case("text", "a system message beside", 1, {"text": "a", "system": "s"}, "'system' cannot be used"),
    Case("text", "a number", 1, {"text": 3}, "'text' is of type int"),
    Case("pair", "no rejected", 2, {"question": "q", "chosen": "a"},
         "`question` and `chosen`, but no `rejected`"),
    Case("pair", "no prompt", 2, {"chosen": "a", "rejected": "b"}, "but no `prompt`"),
    Case("pair", "a margin that is a list", 2, PAIR | {"margin": []}, "'margin' is []"),
    Case("pair", "a margin that is no", 2, PAIR | {"margin": False}, "'margin' is False"),
    Case("pair", "a margin below 0", 2, PAIR | {"margin": -5}, "'margin' is -5"),
    Case("pair", "a margin beyond fp32", 2, PAIR | {"margin": 1e300}, "32 bits"),
    Case("pair", "scores the other way", 2, PAIR | {"score_chosen": 1, "score_rejected": 2},
         "swap the two"),
    Case("pair", "a score that is a yes", 2, PAIR | {"score_chosen": True, "score_rejected": 0},
         "'score_chosen' is True"),
    Case("pair", "a masked reply", 2, {"prompt": "q", "chosen": [A | {"weight": 0}], "rejected": [B]},
         "marked as context"),
    Case("pair", "another conversation", 2, {"prompt": "p", "chosen": [Q, A], "rejected": [Q, B]},
         "turns before the reply"),
    Case("pair", "OpenAI's, without the other", 2, {"input": {"messages": [Q]}, "preferred_output": [A]},
         "there is no pair"),
    Case("scores", "an underscore", 2, {"prompt": "q", "responses": ["a", "b"], "scores": ["1_0", 1]},
         "scores[0]"),
    Case("scores", "one too few", 2, {"prompt": "q", "responses": ["a", "b"], "scores": [1]},
         "1 numbers for 2"),
    Case("answers", "ranks and scores", 2, {"prompt": "q", "answers": [*OBJECT, {"answer": "b", "rank": 1}]},
         "give all the same kind"),
    Case("answers", "no answer in an object", 2, {"prompt": "q", "answers": [*OBJECT, {"score": 2}]},
         "answers[1] has none of"),
    Case("HelpSteer3", "a preference in words", 2, {"context": "q", "response1": "a", "response2": "b",
         "overall_preference": "2nd"}, "'overall_preference' is '2nd'"),
    Case("file", "a text", 1, b"hello\n", '{"text": "..."}', name="rows.txt"),
    Case("file", "half an Arrow file", 1, b"ARROW1..", "cannot be read as .arrow", name="rows.arrow"),
    Case("file", "no parquet", 1, b"PAR1", "cannot be read as .parquet", name="rows.parquet"),
    Case("file", "a torn archive", 1, gzip.compress(b'{"text": "a"}\n' * 99)[:-9],
         "cannot be read as .jsonl.gz", name="rows.jsonl.gz"),
    Case("file", "nothing in it", 1, b"", "the file is empty"),
    Case("file", "nulls alone", 1, {"prompt": None, "answer": None}, "nulls alone"),
    # What looks bad and is right.
    Case("messages", "parts, marks and nulls", 1, chat(Q | {"name": None}, A | {"weight": 1,
         "content": [{"type": "text", "text": "a"}]}), "", DONE),
    Case("pair", "Orca's", 2, {"system": "s", "question": "q", "chosen": "a", "rejected": "b"}, "", DONE),
    Case("prompt", "a label for a reward", 3, {"prompt": "q", "response": "a", "label": "sports"}, "", DONE),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.form}, {case.wrong}")
def test_a_bad_row(case, tmp_path, tiny, forks):
    path = tmp_path / case.name
    content = case.content
    if not isinstance(content, bytes):
        content = json.dumps(content).encode() + b"\n"
        content += b"" if case.code == BAD else content.replace(b'"q"', b'"p"') * 19
    path.write_bytes(content)
    flags = {"data_path": path, "data_split": "1,1,1", "output_dir": tmp_path / "output", "eval_fraction": 0}
    flags |= {"dry_run": True, "data_output_path": tmp_path / "cache"}
    done = forks.run(case.step, step_flags(tiny, case.step, **flags), cwd=str(tmp_path), seconds=60)
    text = done.text()
    assert (done.code, "Traceback" in text, case.word in text) == (case.code, False, True), text
    if case.code == BAD:
        assert str(path) in text and text.startswith("error: 1 problem, nothing was started:")
    assert not (tmp_path / "output").exists()
