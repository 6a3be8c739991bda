#!/usr/bin/env python
"""Serves a reward model over HTTP, for step 3's --reward http://HOST:PORT/score and other clients.

    python serving/reward_server.py --model_name_or_path OUT/export --host 127.0.0.1 --port 8000

POST /score {"prompts": [...], "responses": [...]} returns {"scores": [...]}; GET /health describes the served
model. Prompts are texts as the model was trained on them, rendered by its template, and responses are
appended unchanged: the end-of-turn token is added here, a leading space is not. With --token_file, or
TRIPTYCH_TOKEN in the environment, every request must carry that token: Authorization: Bearer TOKEN.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import REQUIRED, Problems, begin_tool, flag, parse_args
from common.flags.groups import TokenizerArguments


@dataclass
class ServeArguments(TokenizerArguments):
    """A served reward model."""

    model_name_or_path: str = flag(REQUIRED, "reward model: the export/ folder of step 2, or a hub name")
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0: all addresses, for other machines")
    port: int = flag(8000, "port to listen on; 0: a free one, which is printed", low=0, high=65535)
    token_file: str = flag(
        "", "file with the token that clients must send; empty: the environment variable TRIPTYCH_TOKEN"
    )
    max_request_bytes: int = flag(16 * 2**20, "reject longer requests without reading them", low=1)
    max_request_rows: int = flag(1024, "maximum rows of a request", low=1)
    max_text_characters: int = flag(200_000, "maximum characters of a prompt or a response", low=1)
    batch_size: int = flag(32, "sequences per forward pass", low=1)
    max_seq_len: int = flag(
        0,
        "maximum tokens of prompt and response; longer prompts lose their beginning; 0: the model's limit",
        low=0,
    )
    dtype: str = flag(
        "",
        "weights and activations; empty: bf16 on a GPU that supports it, else fp32",
        choices=("fp32", "bf16", "fp16"),
    )


if __name__ == "__main__":
    begin_tool(ServeArguments, __doc__)

from common.data.dialogue import Template
from common.flags.access_token import server_token
from common.models.value_model import has_saved_head
from common.programs import conversation_form, model_checks, running, startup
from common.programs.conversation_form import closing_of
from common.programs.reward_scorer import RewardScorer, load_frozen_value_model
from common.runs.export import read_metadata
from serving.web_server import Guard, RejectedRequest, address_of, bind, build_app, is_loopback, run_server

ACCURACY = ("accuracy", "accuracy_low", "accuracy_high", "pairs")  # on held-out pairs, from triptych.json


@dataclass
class ScoreRequest:
    """Body of POST /score; step 3 sends `rows` to every reward; they are ignored."""

    prompts: list[str]
    responses: list[str]
    rows: list[dict[str, Any]] | None = None


def create_app(scorer: RewardScorer, args: ServeArguments, *, token: str = "") -> Guard:
    """The web application of a scorer; with a token it rejects requests without it."""
    app = build_app(args.max_request_bytes)

    @app.post("/score")
    def score(body: ScoreRequest) -> dict[str, list[float]]:
        """A score for each response."""
        num_rows = len(body.prompts)
        if num_rows != len(body.responses):
            counts = f"{num_rows} prompts but {len(body.responses)} responses"
            raise RejectedRequest(422, f"{counts}; send one prompt for each response")
        if num_rows > args.max_request_rows:
            limit = f"--max_request_rows {args.max_request_rows}"
            raise RejectedRequest(413, f"{num_rows} rows are more than {limit}; send smaller batches")
        longest = max(map(len, body.prompts + body.responses), default=0)
        if longest > args.max_text_characters:
            limit = f"--max_text_characters {args.max_text_characters}"
            raise RejectedRequest(
                413, f"a text has {longest} characters, more than {limit}; send shorter ones"
            )
        scores = scorer.score(body.prompts, body.responses)
        if not all(map(math.isfinite, scores)):  # not representable in JSON
            raise RejectedRequest(500, "a score is not finite; serve the model with --dtype fp32")
        return {"scores": scores}

    @app.get("/health")
    def health() -> dict[str, Any]:
        """Facts about the served model."""
        return scorer.facts

    return Guard(app, token)


def load_scorer(args: ServeArguments, template: Template) -> RewardScorer:
    """The scorer of the model at --model_name_or_path. Raises ValueError."""
    name = args.model_name_or_path
    model = load_frozen_value_model(name, template.tokenizer, args)
    metadata = read_metadata(name)
    facts = {"name": name, "step": metadata.get("step"), "template": metadata.get("template")}
    return RewardScorer(
        model,
        template.tokenizer,
        batch_size=args.batch_size,
        max_tokens=args.max_seq_len,
        closing_ids=closing_of(name, template),
        facts=facts | {name: metadata.get("eval", {}).get(name) for name in ACCURACY},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Check, load, serve until Ctrl-C; `argv` defaults to sys.argv[1:]."""
    problems = Problems()
    args = parse_args(ServeArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    token = server_token(args.token_file, problems)
    name = args.model_name_or_path
    config = model_checks.check_model("--model_name_or_path", name, args, problems, takes_adapter=True)
    if config and not has_saved_head(name):
        problems.add(
            f"--model_name_or_path {name} has no trained score head; give the export/ folder of step 2"
        )
    model_checks.check_length(config, args.max_seq_len, "--max_seq_len", problems)
    tokenizer = config and model_checks.check_tokenizer("--model_name_or_path", name, args, problems)
    template, _ = conversation_form.find_template("--model_name_or_path", name, args, tokenizer, problems)
    bound = bind(args.host, args.port, problems)  # fails before a model is loaded
    problems.exit_if_any()
    startup.print_notes(args, argv)
    if not token and not is_loopback(bound):
        startup.print_note(
            f"--host {args.host} without a token: anyone who can reach the port can use it; give --token_file"
        )
    with startup.as_problem(problems):
        scorer = load_scorer(args, template)
    print(f"{name} answers POST {address_of(bound)}/score and GET /health; Ctrl-C ends it", flush=True)
    run_server(create_app(scorer, args, token=token), bound)


if __name__ == "__main__":
    running.run_program(main, shows_progress=False)
