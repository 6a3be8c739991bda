"""What other programs read in our exports: docs/results/judges.json and docs/exports.md have what they said.

The programs are asked again, and the two files written again, by

    TRIPTYCH_PEERS=DIR python -m pytest tests/judges -n 0

where DIR/NAME are environments of benchmarks/make_peer_env.sh. Without them a change of what the programs
would read is seen by digests of the files.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exports import KINDS, LONG, TALK, TEMPLATES, Export, build_llama_tokenizer, chat, make_exports
from forked_runs import fork_server
from ours import OurReading, turns
from program_runs import ROOT, free_port, run
from safetensors import safe_open

from common.data.chat_template import build_template
from common.data.example import Message

JUDGES, PAGE = ROOT / "docs/results/judges.json", ROOT / "docs/exports.md"
OF_TRANSFORMERS = ("model", "pipeline", "serve", "peft")
ASKED = {
    "transformers-4.57": OF_TRANSFORMERS,
    "transformers-5.24": OF_TRANSFORMERS,
    "trl-1.16": ("trl_sft", "trl_dpo", "trl_reward", "trl_grpo"),
    "lm-eval": ("lm_eval",),
    "ctranslate2": ("ctranslate2",),
    "llama.cpp": ("llama_cpp",),
}
OURS = ("triptych", "README")  # stems of files that no judge reads
PROGRAMS = {  # name, package, what is done
    "model": ("transformers, `from_pretrained`", "transformers", "conversations in a padded batch"),
    "pipeline": ("transformers, `pipeline`", "transformers", "messages in a padded batch, texts to score"),
    "serve": ("`transformers serve`", "transformers", "OpenAI's client, a conversation at a time"),
    "peft": ("PEFT", "peft", "adapters, from another folder and merged"),
    "trl_sft": ("TRL, `SFTTrainer`", "trl", "loss of replies, then two steps"),
    "trl_dpo": ("TRL, `DPOTrainer`", "trl", "log-probabilities of replies, then two steps"),
    "trl_reward": ("TRL, `RewardTrainer`", "trl", "scores of pairs, then two steps"),
    "trl_grpo": ("TRL, `GRPOTrainer`", "trl", "a step with the exported reward model"),
    "lm_eval": ("lm-evaluation-harness", "lm_eval", "`--apply_chat_template`, one question each"),
    "ctranslate2": ("CTranslate2", "ctranslate2", "converted, prompts in one batch"),
    "llama_cpp": (
        "llama.cpp of llama-cpp-python",
        "llama_cpp_python",
        "`convert_hf_to_gguf.py`, a chat with the GGUF file",
    ),
}
WORDS = {
    "sent": "prompts token by token", "said": "replies", "logprobs": "log-probabilities", "scores": "scores",
    "missing": "no weight missing", "loss": "loss", "logps": "log-probabilities", "mean_score": "scores",
    "rewards": "rewards",
}  # fmt: skip
# What a program cannot do, by question and base.
OF_DIGESTS = "the converter knows byte-level tokenizers that were published; these are the tests' own"
LIMITS = {
    ("llama_cpp", "chat"): OF_DIGESTS,
    ("llama_cpp", "image"): OF_DIGESTS,
    (
        "llama_cpp",
        "bare",
    ): "a space after `<s>`, which the GGUF file does not forbid",
}
HEADER = "| program | version | what it did | exports | what it said |\n|---|---|---|---|---|\n"
SKIPPED = ("transformers_version", "peft_version", "_name_or_path")  # not what an export means


@pytest.fixture(scope="session")
def exports(tmp_path_factory, make_tokenizer) -> Iterator[list[Export]]:
    folder = tmp_path_factory.mktemp("judges")
    with fork_server(folder / "log") as forks:
        yield make_exports(folder, make_tokenizer, forks)


def content_of(file: Path, root: Path) -> str:
    """What a file says, whatever the machine and the numbers that were trained."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as tensors:
            slices = [(name, tensors.get_slice(name)) for name in sorted(tensors.keys())]
            return json.dumps([(name, some.get_shape(), some.get_dtype()) for name, some in slices])
    text = file.read_text().replace(str(root), "FOLDER")
    if file.suffix == ".json":
        content = {name: value for name, value in json.loads(text).items() if name not in SKIPPED}
        return json.dumps(content, sort_keys=True)
    return text


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digests_of(exports: list[Export]) -> dict[str, dict[str, str]]:
    """Digests of all files that another program may read, by export and file."""
    result = {}
    for export in exports:
        root = export.folder.parents[2]
        folders = [folder for folder in (export.folder, export.adapter) if folder]
        files = [file for folder in folders for file in sorted(folder.iterdir()) if file.stem not in OURS]
        named = {f"{file.parent.name}/{file.name}": content_of(file, root) for file in files}
        result[export.name] = {name: digest(content) for name, content in named.items()}
    return result


# ---- Without the programs


@pytest.mark.slow
def test_exports_say_what_the_judges_read(exports, tmp_path):
    """A difference is no fault in itself: the programs must be asked again, see the top of this file."""
    judged = json.loads(JUDGES.read_text())
    actual = digests_of(exports)
    assert actual.keys() == judged["exports"].keys()
    changed = [
        f"{export}: {file}"
        for export, files in actual.items()
        for file in sorted(files.keys() | judged["exports"][export].keys())
        if files.get(file) != judged["exports"][export].get(file)
    ]
    assert not changed, "the judges have read other files; ask them again"
    assert judged["verdicts"].keys() == ASKED.keys()
    read = digest(json.dumps(judged["exports"], sort_keys=True))
    outdated = [peer for peer, verdict in judged["verdicts"].items() if verdict["read"] != read]
    assert not outdated, "these have read other files than the rest; ask them again"

    lora = next(export for export in exports if export.name == "chat sft lora")
    parent = shutil.copytree(lora.folder.parent, tmp_path / "chat-lora/sft")
    copies = {"folder": parent / "export", "adapter": parent / "adapter"}
    plants = [  # mistakes that must be seen
        (copies["folder"] / "generation_config.json", '"eos_token_id": [', '"eos_token_id": [9,'),
        (copies["folder"] / "tokenizer_config.json", "<|im_start|>", "<|im_begin|>"),
        (copies["adapter"] / "adapter_config.json", "bases/chat", "bases/bare"),
    ]
    copied = [Export(lora.base, lora.kind, **copies)]
    before = digests_of(copied)
    for file, right, wrong in plants:
        text = file.read_text()
        assert right in text
        file.write_text(text.replace(right, wrong))
        assert digests_of(copied) != before
        file.write_text(text)
    assert digests_of(copied) == before


def test_the_page_has_what_the_judges_said():
    assert HEADER + build_table(json.loads(JUDGES.read_text())) + "\n" in PAGE.read_text()


def build_table(judged: dict[str, Any]) -> str:
    """Rows of docs/exports.md, those with a difference first."""
    rows = []
    for verdict in judged["verdicts"].values():
        for question, answers in verdict["answers"].items():
            name, package, does = PROGRAMS[question]
            exports = [export for names in answers.values() for export in names]
            kinds = [kind for kind in KINDS if any(kind in export for export in exports)]
            same = [
                word for word in WORDS.values() if any(word in a for a in answers if a.startswith("same"))
            ]
            misses = [said_of(question, *miss) for miss in answers.items() if not miss[0].startswith("same")]
            said = [*misses, f"the same {', '.join(dict.fromkeys(same))}"] if same else misses
            version = verdict["versions"][package]
            if package != "transformers":
                version += f", transformers {verdict['versions']['transformers']}"
            cells = [name, version, does, f"{len(exports)}: {', '.join(kinds)}"]
            cells += ["; ".join(said)]
            rows.append((not misses, f"| {' | '.join(cells)} |\n"))
    return "".join(row for _, row in sorted(rows, key=lambda row: row[0]))


def said_of(question: str, answer: str, names: list[str]) -> str:
    """A difference, its bases, and why."""
    bases = sorted({export.split()[0] for export in names})
    limits = sorted({LIMITS[question, base] for base in bases if (question, base) in LIMITS})
    return f"{', '.join(bases)}: {answer}{''.join(f' ({limit})' for limit in limits)}"


def test_a_dialogue_has_the_tokens_of_the_exported_chat_template():
    """Under Llama 2's tokenizer too, which adds a space to the start of a text, but not after BOS."""
    tokenizer = build_llama_tokenizer()
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text().replace("<|im_end|>", "</s>")
    talk = chat("How are you?", "Fine.", "What?", "The cat.")
    for name in ("human_assistant", "one_line", "plain", "chat"):
        template = build_template(name, tokenizer)
        *prompt, reply = turns(talk)
        row = template.encode(template.segments(prompt, reply, learn_all_turns=True), 1000)
        options = {"chat_template": template.chat_template, "return_dict": True}
        ids = row.input_ids + template.closing_ids
        assert ids == tokenizer.apply_chat_template(talk, **options)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id and not row.response_mask[0]
        text = template.encode(template.text_segments("How"), 1000)
        assert text.input_ids == tokenizer("How</s>").input_ids
    template = build_template("plain", tokenizer)
    bare, led = (template.segments([Message("user", f"{bos}How")], "Fine.") for bos in ("", "<s>"))
    assert template.encode(bare, 1000) == template.encode(led, 1000), "a prompt may begin with BOS"


# ---- With the programs


def build_task(exports: list[Export], peer: str, folder: Path) -> dict[str, Any]:
    """What ask.py is asked."""
    scorers = {(e.base, bool(e.adapter)): str(e.folder) for e in exports if e.kind == KINDS[1]}
    asked = [
        {"name": e.name, "kind": e.kind, "folder": str(e.folder), "adapter": str(e.adapter or "")}
        | {"scorer": scorers[e.base, bool(e.adapter)]}
        for e in exports
    ]
    return {
        "ask": ASKED[peer],
        "exports": asked,
        "prompts": [*map(chat, TALK), chat(*LONG[:3])],
        "talks": [chat(question, good) for question, (good, _) in TALK.items()],
        "worse": [chat(question, bad) for question, (_, bad) in TALK.items()],
        "folder": str(folder),
        "port": free_port(),
    }


def is_same(theirs: Any, ours: Any) -> bool:
    """Numbers to 1e-4, texts but for the space around them; a list may hold ours twice, or its beginning."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return bool(theirs) and all(is_same_item(one, ours[n % len(ours)]) for n, one in enumerate(theirs))
    return is_same_item(theirs, ours)


def is_same_item(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, float):
        return theirs == pytest.approx(ours, rel=1e-4, abs=1e-4)
    return (theirs.strip() if isinstance(theirs, str) else theirs) == ours


def judge(answer: dict[str, Any], ours: OurReading, scorer: OurReading) -> str:
    """An answer in words, without the numbers."""
    if "error" in answer:
        return f"fails: `{answer['error'].replace(str(ours.export.folder), 'FOLDER')[:120]}`"
    same, other = [], []
    for name in sorted(answer.keys() & WORDS.keys(), key=list(WORDS).index):
        if name == "missing":
            is_right = not answer[name]
        elif name == "rewards":
            scores = scorer.score(answer["talks"])
            is_right = is_same(answer[name], sum(scores) / len(scores))
        else:
            is_right = is_same(answer[name], getattr(ours, name))
        (same if is_right else other).append(WORDS[name])
    parts = {"other": other, "same": same}
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts.items() if names)


@pytest.mark.slow
@pytest.mark.skipif("TRIPTYCH_PEERS" not in os.environ, reason="TRIPTYCH_PEERS names no environments")
@pytest.mark.parametrize("peer", ASKED)
def test_a_judge_reads_what_we_mean(peer, exports, tmp_path, process_group):
    python = Path(os.environ["TRIPTYCH_PEERS"], peer, "bin/python")
    if not python.exists():
        pytest.skip(f"no {python}")
    task = build_task(exports, peer, tmp_path)
    (tmp_path / "task.json").write_text(json.dumps(task))
    command = [python, Path(__file__).with_name("ask.py"), tmp_path / "task.json"]
    done = run([*map(str, command)], cwd=tmp_path, seconds=590)
    *answers, last = map(json.loads, done.stdout.splitlines())
    readings = {str(export.folder): OurReading(export, task) for export in exports}
    by_name = {export.name: readings[str(export.folder)] for export in exports}
    scorers = {one["name"]: readings[one["scorer"]] for one in task["exports"]}
    for reading in readings.values():
        if reading.export.kind != "reward":
            assert reading.said == [*(good for good, _ in TALK.values()), LONG[-1]], "not learnt"
    said: dict[str, dict[str, list[str]]] = {}
    for answer in answers:
        verdict = judge(answer, by_name[answer["export"]], scorers[answer["export"]])
        said.setdefault(answer["ask"], {}).setdefault(verdict, []).append(answer["export"])
    before = json.loads(JUDGES.read_text()) if JUDGES.exists() else {"exports": {}, "verdicts": {}}
    files = digests_of(exports)
    verdict = last | {"read": digest(json.dumps(files, sort_keys=True)), "answers": said}
    after = {"exports": files, "verdicts": before["verdicts"] | {peer: verdict}}
    JUDGES.write_text(json.dumps(after, indent=1, sort_keys=True) + "\n")
    head, _, rest = PAGE.read_text().partition(HEADER)
    PAGE.write_text(head + HEADER + build_table(after).rstrip() + rest[rest.index("\n\n") :])
    misses = [
        f"{name} {export}: {verdict}"
        for name, verdicts in said.items()
        for verdict, names in verdicts.items()
        for export in names
        if not verdict.startswith("same") and (name, export.split()[0]) not in LIMITS
    ]
    assert not misses, "\n".join(misses)
    assert after == before, f"{JUDGES} has been written again"
