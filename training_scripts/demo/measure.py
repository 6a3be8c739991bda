"""Measure what the demo's three steps reached, on held-out conversations, and print it beside the aims.

    python training_scripts/demo/measure.py --inputs DIR --base DIR/base --sft SFT/export --ppo PPO/export \\
        --ppo_run PPO --reward_json FILE --output_dir OUT

Nothing of the trainers is used but the held-out scores that step 3 logged: plain forward passes and plain
`model.generate` in fp32, and the VADER lexicon, which the trainers never saw. Prints one table and five
held-out prompts with the replies of the three models, and writes OUT/summary.json. The exit status is 0
whether or not an aim is met.
"""

import argparse
import json
import math
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.data.dialogue import Template, build_template
from common.data.example import Message
from common.data.tokenizer import load_tokenizer
from common.programs.startup import quiet_libraries
from common.runs.run_files import read_run
from training_scripts.demo.aims import format_summary
from training_scripts.demo.text_measures import (
    distinct_n,
    kl_per_reply,
    mean_words,
    response_mask_until_end,
    unigram_perplexity,
)
from training_scripts.demo.turns import Turn, context_of

# Dimensions: B sequences, P prompt, R response, T = P + R.

_SHOWN_WORDS = range(4, 13)  # shown prompts have this many words: they say something, and fit on a line


class SampledBatch(NamedTuple):
    """Prompts and sampled responses of one batch."""

    prompt_ids: Tensor  # (B, P) int64, left-padded
    prompt_mask: Tensor  # (B, P) bool
    response_ids: Tensor  # (B, R) int64; what follows the end token is not to be read
    response_mask: Tensor  # (B, R) bool, the end token included


class Samples(NamedTuple):
    """Sampled replies, in the order of the prompts."""

    batches: list[SampledBatch]
    texts: list[str]
    finished_fraction: float  # share that ended by itself within the token limit


def load_turns(path: Path, limit: int | None = None) -> list[Turn]:
    """The first `limit` turns of a file sft/*.jsonl. Raises ValueError naming file and line of a bad row."""
    turns = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and len(turns) == limit:
                break
            try:
                row = json.loads(line)
                turns.append(Turn(context_of(row["prompt"]), row["answer"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: no row of build_inputs.py ({error})") from error
    return turns


def scored_rows(turns: Sequence[Turn], template: Template) -> list[tuple[list[int], list[bool]]]:
    """(token ids, response mask) of each turn; the response is the reply with its end token, as in step 1."""
    segments = [template.segments((Message("user", turn.context),), turn.reply) for turn in turns]
    return [(row.input_ids, row.response_mask) for row in template.tokenise_batch(segments)]


def response_rows(rows: Sequence[tuple[list[int], list[bool]]]) -> Iterator[list[int]]:
    """The scored token ids of each row."""
    for input_ids, response_mask in rows:
        yield [token for token, counts in zip(input_ids, response_mask, strict=True) if counts]


@torch.no_grad()
def model_perplexity(
    model: PreTrainedModel, rows: Sequence[tuple[list[int], list[bool]]], batch_size: int
) -> float:
    """Perplexity per response token, end token included: every token counts alike, whatever its row."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    negative_log_likelihood, num_tokens = 0.0, 0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        longest = len(batch[-1][0])
        input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch], device=model.device)
        mask = torch.tensor(
            [mask + [False] * (longest - len(mask)) for _, mask in batch], device=model.device
        )
        attends = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
        logits = model(input_ids=input_ids, attention_mask=attends.to(model.device)).logits
        targets = mask[:, 1:]  # (B, T-1) bool: the logits at a position predict the next one
        negative_log_likelihood += torch.nn.functional.cross_entropy(
            logits[:, :-1][targets].float(), input_ids[:, 1:][targets], reduction="sum"
        ).item()
        num_tokens += int(targets.sum())
    return math.exp(negative_log_likelihood / num_tokens)


def left_pad(rows: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(B, P) int64 ids and (B, P) bool mask, padding on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return ids, mask


@torch.no_grad()
def sample_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    *,
    max_response_tokens: int,
    batch_size: int,
    seed: int,
) -> Samples:
    """One reply for each prompt, drawn at temperature 1 from the whole distribution."""
    torch.manual_seed(seed)
    batches, texts, num_finished = [], [], 0
    for first in range(0, len(prompts), batch_size):
        prompt_ids, prompt_mask = left_pad(prompts[first : first + batch_size], tokenizer.pad_token_id)
        prompt_ids, prompt_mask = prompt_ids.to(model.device), prompt_mask.to(model.device)
        output = model.generate(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_response_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        response_ids = output[:, prompt_ids.shape[1] :]
        response_mask = response_mask_until_end(response_ids, tokenizer.eos_token_id)
        batches.append(SampledBatch(prompt_ids, prompt_mask, response_ids, response_mask))
        for ids, mask in zip(response_ids, response_mask, strict=True):
            reply = ids[mask]
            num_finished += int(reply[-1] == tokenizer.eos_token_id)
            texts.append(tokenizer.decode(reply, skip_special_tokens=True).strip())
    return Samples(batches, texts, num_finished / len(texts))


@torch.no_grad()
def response_logprobs(model: PreTrainedModel, batch: SampledBatch) -> Tensor:
    """(B, R) fp32 log-probabilities of the responses; undefined outside the response mask."""
    input_ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)  # (B, T)
    attends = torch.cat([batch.prompt_mask, batch.response_mask], dim=1).long()
    position_ids = (attends.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=input_ids, attention_mask=attends, position_ids=position_ids).logits
    predictions = logits[:, batch.prompt_ids.shape[1] - 1 : -1].float()  # (B, R, V)
    return predictions.log_softmax(dim=-1).gather(-1, batch.response_ids.unsqueeze(-1)).squeeze(-1)


def mean_kl(model: PreTrainedModel, ref_model: PreTrainedModel, batches: Sequence[SampledBatch]) -> float:
    """Mean KL to `ref_model` in nats a reply, on replies that were sampled from `model`."""
    per_reply = [
        kl_per_reply(
            response_logprobs(model, batch), response_logprobs(ref_model, batch), batch.response_mask
        )
        for batch in batches
    ]
    return torch.cat(per_reply).mean().item()


def mean_sentiment(texts: Sequence[str]) -> float:
    """Mean VADER compound score, from -1 (negative) to 1 (positive)."""
    analyzer = SentimentIntensityAnalyzer()
    return sum(analyzer.polarity_scores(text)["compound"] for text in texts) / len(texts)


def read_evaluations(run: Path) -> dict[str, float]:
    """The scores of step 3's held-out prompts before, half-way and after, and the win rate at the end.

    Raises ValueError where the run has fewer than two evaluations.
    """
    curves = read_run(run).curves
    if len(curves["eval/score"].values if "eval/score" in curves else ()) < 2:
        raise ValueError(f"--ppo_run {run} has no held-out scores: give step 3 --eval_data_path")
    scores = curves["eval/score"].values
    found = {"score_before": scores[0], "score_halfway": scores[len(scores) // 2], "score_after": scores[-1]}
    return found | {"win_rate": curves["eval/win_rate"].last}


def read_last_json(path: Path, key: str) -> float:
    """The number under `key` in the last JSON line of a file that has it; other lines are passed over.

    Raises ValueError when no line has it.
    """
    found = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            try:
                found = json.loads(line).get(key, found)
            except json.JSONDecodeError:
                continue  # a log line may begin with a brace
    if found is None:
        raise ValueError(
            f"--reward_json {path}: no JSON line with {key!r}; pass the output of step2_reward/rw_eval.py"
        )
    return float(found)


def choose_shown(turns: Sequence[Turn], count: int) -> list[int]:
    """Indexes of `count` turns: the first whose message is neither a single word nor longer than a line.

    Where these are too few, the first of the others come after them.
    """
    fits = [len(turn.context.split()) in _SHOWN_WORDS for turn in turns]
    return sorted(range(len(turns)), key=lambda index: not fits[index])[:count]


def load_model(path: Path, device: str) -> PreTrainedModel:
    """The model of a folder in fp32, ready to be asked."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()


def measure(args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """The numbers of summary.json, and the lines to print below the table."""
    tokenizer = load_tokenizer(str(args.sft))
    template = build_template(args.template, tokenizer)
    held_out = load_turns(args.inputs / "sft" / "eval.jsonl", max(args.num_scored, args.num_prompts))
    # The file's order is the same for every seed of this program; the prompts asked follow --seed.
    asked = random.Random(args.seed).sample(held_out, min(args.num_prompts, len(held_out)))
    eval_rows = scored_rows(held_out[: args.num_scored], template)
    prompts = [
        ids[: mask.index(True)]
        for ids, mask in scored_rows([Turn(turn.context, "-") for turn in asked], template)
    ]
    train_rows = scored_rows(load_turns(args.inputs / "sft" / "train.jsonl"), template)
    unigram = unigram_perplexity(response_rows(train_rows), response_rows(eval_rows), len(tokenizer))

    options: dict[str, Any] = {
        "max_response_tokens": args.max_response_tokens,
        "batch_size": args.batch_size,
        "seed": args.seed,
    }
    shown = choose_shown(asked, args.num_shown)
    base = load_model(args.base, args.device)
    base_texts = sample_replies(base, tokenizer, [prompts[index] for index in shown], **options).texts
    sft, ppo = load_model(args.sft, args.device), load_model(args.ppo, args.device)
    sft_samples = sample_replies(sft, tokenizer, prompts, **options)
    ppo_samples = sample_replies(ppo, tokenizer, prompts, **options)
    numbers = {
        "unigram_perplexity": unigram,
        "sft_perplexity": model_perplexity(sft, eval_rows, args.batch_size),
        "reward_accuracy": read_last_json(args.reward_json, args.reward_key),
        **read_evaluations(args.ppo_run),
        "vader_sft": mean_sentiment(sft_samples.texts),
        "vader_ppo": mean_sentiment(ppo_samples.texts),
        "kl": mean_kl(ppo, sft, ppo_samples.batches),
        "distinct2_sft": distinct_n(sft_samples.texts),
        "distinct2_ppo": distinct_n(ppo_samples.texts),
        "words_sft": mean_words(sft_samples.texts),
        "words_ppo": mean_words(ppo_samples.texts),
    }
    lines = [
        f"{len(prompts)} held-out prompts, one reply each of at most {args.max_response_tokens} tokens; "
        f"ended by themselves: SFT {sft_samples.finished_fraction:.1%}, "
        f"PPO {ppo_samples.finished_fraction:.1%}"
    ]
    for row, index in enumerate(shown):
        lines += ["", f"Human: {asked[index].context}"]
        for name, texts, place in (
            ("base", base_texts, row),
            ("SFT", sft_samples.texts, index),
            ("PPO", ppo_samples.texts, index),
        ):
            one_line = " ".join(texts[place].split())  # a sampled line break would look like another reply
            lines.append(f"  {name:<4}  {one_line}")
    return numbers, lines


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--inputs", type=Path, required=True, help="folder that build_inputs.py wrote")
    add("--base", type=Path, required=True, help="model before step 1")
    add("--sft", type=Path, required=True, help="step 1's export")
    add("--ppo", type=Path, required=True, help="step 3's export")
    add(
        "--reward_json",
        type=Path,
        required=True,
        help="output of step2_reward/rw_eval.py, its last JSON line is read",
    )
    add("--ppo_run", type=Path, required=True, help="step 3's --output_dir: its evaluations are read")
    add("--reward_key", default="accuracy", help="name of the reward model's accuracy in that line")
    add("--output_dir", type=Path, required=True, help="where summary.json goes")
    add("--template", default="human_assistant", help="as in the three steps")
    add("--num_prompts", type=int, default=512, help="held-out prompts, one reply each by SFT and PPO model")
    add("--num_scored", type=int, default=2000, help="held-out replies in the perplexities, at most")
    add("--num_shown", type=int, default=5, help="prompts printed with their replies")
    add("--max_response_tokens", type=int, default=32, help="as in step 3")
    add("--batch_size", type=int, default=64, help="sequences a forward pass")
    add("--seed", type=int, default=1234, help="of the prompts asked and of sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--started_at", type=float, default=None, help="unix time the demo began; now if left out")
    add("--peak_gib", type=float, default=0.0, help="peak memory of the steps before, in GiB")
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints, and writes summary.json."""
    quiet_libraries()
    args = parse_args()
    started_at = args.started_at if args.started_at is not None else time.time()
    numbers, lines = measure(args)
    own_peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    summary = {"seconds": time.time() - started_at, "peak_gib": max(args.peak_gib, own_peak_gib), **numbers}
    print("\n".join([*format_summary(summary), "", *lines]))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
