#!/usr/bin/env python
"""Blind comparison of models on a web page, with an OpenAI-compatible API.

python arena.py output/sft/export output/ppo/export
python arena.py sft=output/sft/export ppo=output/ppo/export --data_path prompts.jsonl
python arena.py export preferences.jsonl
"""

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.flags.access_token import server_token
from common.flags.args import REQUIRED, Problems, begin_tool, flag, parse_args, say_loading
from serving.arguments import SamplingArguments

DATABASE = "output/arena.sqlite3"
EXPORT_TEXT = "Writes judged pairs as rows of prompt, chosen and rejected."


@dataclass
class ArenaArguments(SamplingArguments):
    """Models served on a page."""

    models: list[str] = flag([], "the models, PATH or NAME=PATH: export/ or adapter/ folders, or hub names")
    db: str = flag(DATABASE, "SQLite file of pairs and judgements; created if missing")
    data_path: str = flag("", "data set (file, folder, registered name) to sample prompts from")
    host: str = flag("127.0.0.1", "address to listen on; all but the loopback address need a token")
    port: int = flag(8080, "port to listen on; 0: a free one, which is printed", low=0, high=65535)
    token_file: str = flag(
        "", "file with the token that clients must send; empty: the environment variable TRIPTYCH_TOKEN"
    )
    max_request_bytes: int = flag(2**20, "reject longer requests without reading them", low=1)
    max_new_tokens: int = flag(256, "maximum tokens of an answer", low=1)
    max_seq_len: int = flag(
        8192, "maximum tokens of prompt and answer, or the model's limit if less; 0: that", low=0
    )
    generation_slots: int = flag(32, "answers of a model generated at once; fewer need less memory", low=1)


@dataclass
class ExportArguments:
    """Judgements as training data."""

    output: str = flag(REQUIRED, "file to write, with rows of prompt, chosen and rejected")
    db: str = flag(DATABASE, "SQLite file of pairs and judgements")
    overwrite: bool = flag(False, "replace an existing file")
    labels: bool = flag(
        False, "write one row per answer with a label, for --loss kto of step 2; also if both answers are bad"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["export"]:
        begin_tool(ExportArguments, EXPORT_TEXT, argv=sys.argv[2:], leading="output")
    else:
        begin_tool(ArenaArguments, __doc__, leading="models")
    say_loading()

from common.programs import running, startup
from serving.answering import (
    Sampling,
    load_answerer,
    load_template,
    read_prompts,
)
from serving.arena_app import BlindPairs, create_app
from serving.judgement_store import JudgementStore, export_pairs
from serving.web_server import address_of, bind, is_loopback, run_server


def export(argv: list[str]) -> None:
    """Write the decided pairs of a database for step 2."""
    problems = Problems()
    args = parse_args(ExportArguments, argv, description=EXPORT_TEXT, problems=problems, leading="output")
    target = Path(args.output or "")
    if args.output and target.exists() and not args.overwrite:
        problems.add(f"{target} exists already; give another name, or --overwrite")
    problems.add_if(
        not Path(args.db).is_file(), f"--db {args.db} is not a file; give the database of an arena"
    )
    problems.exit_if_any()
    with startup.as_problem(problems):
        counts = export_pairs(JudgementStore(Path(args.db)), target, as_labels=args.labels)
    message = f"{counts.pop('written', 0)} pairs written to {target}"
    if counts:
        message += "; left out: " + ", ".join(f"{counts[reason]} {reason}" for reason in sorted(counts))
    print(message)


def serve(argv: list[str]) -> None:
    """Check, load, serve until Ctrl-C."""
    problems = Problems()
    args = parse_args(
        ArenaArguments, argv, description=__doc__.splitlines()[0], problems=problems, leading="models"
    )
    paths = _named_paths(args.models, problems)
    token = server_token(args.token_file, problems)
    bound = bind(args.host, args.port, problems)  # fails before a model is loaded
    is_local = bound is not None and is_loopback(bound)
    problems.add_if(
        bound is not None and not is_local and not token,
        f"--host {args.host} accepts connections from other machines; give --token_file, or leave --host out",
    )
    prompts = None
    if args.data_path:
        rows = read_prompts(args.data_path, random.Random())
        with problems.catch():
            prompts = itertools.chain([next(rows)], rows)
    templates = {name: load_template("--models", path, args, problems) for name, path in paths.items()}
    problems.exit_if_any()
    startup.print_notes(args, argv)
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p)
    with startup.as_problem(problems):
        store = JudgementStore(Path(args.db))
        limits = {"max_length": args.max_seq_len, "max_slots": args.generation_slots}
        models = {
            name: load_answerer(path, templates[name], args, sampling, **limits)
            for name, path in paths.items()
        }
    app = create_app(
        BlindPairs(models, store, sampling, prompts=prompts),
        max_request_bytes=args.max_request_bytes,
        token=token,
        is_local=is_local,
    )
    print(
        f"the arena of {', '.join(paths)} is at {address_of(bound)}/ (API: /v1); Ctrl-C ends it", flush=True
    )
    print(f"judgements are saved to {args.db}", flush=True)
    run_server(app, bound)


def _named_paths(words: list[str], problems: Problems) -> dict[str, str]:
    """Paths of the models by name, in order; a path without a name is its own name."""
    paths: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        if not path or Path(word).exists():
            name = path = word
        problems.add_if(not name, f"--models {word}: a name is missing before the =")
        problems.add_if(name in paths, f"--models names {name} twice; tell them apart by NAME=PATH")
        paths[name] = path
    problems.add_if(not paths, "no model is given: arena.py SFT PPO, each PATH or NAME=PATH")
    return paths


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, or export the judgements. `argv` defaults to sys.argv[1:]."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["export"]:
        export(words[1:])
    else:
        serve(words)


if __name__ == "__main__":
    running.run_program(main, shows_progress=False)
