"""Measure what the demo's three steps reached, on held-out conversations, and print it beside the aims.

    python training_scripts/demo/measure.py OUTPUT_DIR

OUTPUT_DIR is what run_demo.sh filled: inputs/, step1/, step3/, reward_eval.log. Nothing of the trainers is
used but the held-out scores that step 3 logged: plain forward passes and plain `model.generate` in fp32, and
the VADER lexicon, which the trainers never saw. Prints one table and five held-out prompts with the replies
of the three models, and writes OUTPUT_DIR/summary.json. The exit status is 0 whether or not an aim is met.
"""

import argparse
import json
import math
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.data.adapters.row_forms import read_row
from common.data.dialogue import Template, Tokenised, build_template
from common.data.example import Example
from common.data.tokenizer import load_tokenizer
from common.programs.startup import quiet_libraries
from tools.report.run_reader import read_run
from training_scripts.demo.aims import format_summary

# Dimensions: B sequences, P prompt, R response, T = P + R, V vocabulary.

SEED = 1234
MAX_RESPONSE_TOKENS = 32  # as in step 3
NUM_SHOWN, SHOWN_WORDS = 5, range(4, 13)  # prompts of so many words say something, and fit on a line


class SampledBatch(NamedTuple):
    """Prompts, padded on the left, with a sampled response each."""

    input_ids: Tensor  # (B, T) int64
    attention_mask: Tensor  # (B, T) int64
    response_mask: Tensor  # (B, T) bool, the end token included, nothing after it


def load_examples(path: Path) -> list[Example]:
    """The rows of one of build_inputs.py's files as prompt and reply."""
    return [read_row(json.loads(line))[0] for line in path.read_text(encoding="utf-8").splitlines()]


def tokenise(examples: Sequence[Example], template: Template) -> list[Tokenised]:
    """Token ids and response mask of each example; the response has its end token, as in step 1."""
    return template.tokenise_batch([template.segments(one.prompt, one.chosen) for one in examples])


def pad(rows: Iterable[Sequence[int]], value: int, side: str, device: torch.device) -> Tensor:
    """(B, T) int64, rows padded on the `left` or `right` side."""
    tensors = [torch.tensor(row) for row in rows]
    padded = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
    return padded.long().to(device)


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, T-1) fp32: log-probability of every token but the first; undefined where nothing is attended to."""
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), input_ids[:, 1:], reduction="none"
    )
    return -losses


def model_perplexity(model: PreTrainedModel, rows: Sequence[Tokenised], batch_size: int) -> float:
    """Perplexity per response token, end token included: every token counts alike, whatever its row."""
    rows = sorted(rows, key=lambda row: len(row.input_ids))
    log_likelihood, num_tokens = 0.0, 0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        input_ids = pad([row.input_ids for row in batch], 0, "right", model.device)
        attends = pad([[1] * len(row.input_ids) for row in batch], 0, "right", model.device)
        mask = pad([row.response_mask for row in batch], 0, "right", model.device)[:, 1:].bool()
        log_likelihood += token_logprobs(model, input_ids, attends)[mask].sum().item()
        num_tokens += int(mask.sum())
    return math.exp(-log_likelihood / num_tokens)


def unigram_perplexity(
    train_rows: Sequence[Tokenised], eval_rows: Sequence[Tokenised], vocab_size: int
) -> float:
    """Perplexity per response token of eval rows under the train rows' frequencies, each count raised by one.

    Add-one smoothing keeps a token that no train row has from costing infinitely much.
    """
    train, held_out = (
        Counter(t for row in rows for t, is_in in zip(row.input_ids, row.response_mask, strict=True) if is_in)
        for rows in (train_rows, eval_rows)
    )
    total = train.total() + vocab_size
    log_likelihood = sum(count * math.log((train[token] + 1) / total) for token, count in held_out.items())
    return math.exp(-log_likelihood / held_out.total())


@torch.no_grad()
def sample_replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], batch_size: int
) -> tuple[list[SampledBatch], list[str]]:
    """One reply for each prompt, drawn at temperature 1 from the whole distribution, and its text."""
    torch.manual_seed(SEED)
    batches, texts = [], []
    for first in range(0, len(prompts), batch_size):
        rows = prompts[first : first + batch_size]
        prompt_ids = pad(rows, tokenizer.pad_token_id, "left", model.device)  # (B, P)
        prompt_mask = pad([[1] * len(row) for row in rows], 0, "left", model.device)  # (B, P)
        input_ids = model.generate(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_RESPONSE_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # (B, T)
        response_ids = input_ids[:, prompt_ids.shape[1] :]
        mask = mask_until_end(response_ids, tokenizer.eos_token_id)
        replies = [ids[is_in] for ids, is_in in zip(response_ids, mask, strict=True)]
        texts += [tokenizer.decode(reply, skip_special_tokens=True).strip() for reply in replies]
        attention_mask = torch.cat([prompt_mask, mask.long()], dim=1)
        response_mask = torch.cat([torch.zeros_like(prompt_mask).bool(), mask], dim=1)
        batches.append(SampledBatch(input_ids, attention_mask, response_mask))
    return batches, texts


def mask_until_end(response_ids: Tensor, end_id: int) -> Tensor:
    """(B, R) bool, True for each sampled token up to the first end token, that token included."""
    is_end = response_ids == end_id
    ends_before = is_end.long().cumsum(dim=-1) - is_end.long()  # (B, R) end tokens strictly before this one
    return ends_before == 0


def mean_kl(model: PreTrainedModel, ref_model: PreTrainedModel, batches: Sequence[SampledBatch]) -> float:
    """Mean KL to `ref_model` in nats a reply, on replies that were sampled from `model`.

    An unbiased estimate: the sum of log p - log p_ref over a reply's own tokens; of one it may be negative.
    """
    per_reply = []
    for batch in batches:
        logprobs, ref_logprobs = (
            token_logprobs(one, batch.input_ids, batch.attention_mask) for one in (model, ref_model)
        )
        difference = torch.where(batch.response_mask[:, 1:], logprobs - ref_logprobs, 0.0)
        per_reply.append(difference.sum(dim=-1))
    return torch.cat(per_reply).mean().item()


def mean_sentiment(texts: Sequence[str]) -> float:
    """Mean VADER compound score, from -1 (negative) to 1 (positive)."""
    analyzer = SentimentIntensityAnalyzer()
    return sum(analyzer.polarity_scores(text)["compound"] for text in texts) / len(texts)


def distinct_2(texts: Iterable[str]) -> float:
    """Share of different pairs of words among all pairs of all texts together; 0.0 where there is none.

    It falls with the number of texts: compare equal numbers only. Source: Li et al. 2016, arXiv:1510.03055.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    for text in texts:
        words = text.lower().split()
        pairs.update(zip(words, words[1:], strict=False))
    return len(pairs) / pairs.total() if pairs else 0.0


def mean_words(texts: Sequence[str]) -> float:
    """Mean number of whitespace-separated words of a text; an empty text counts as none."""
    return sum(len(text.split()) for text in texts) / len(texts)


def read_evaluations(output_dir: Path) -> dict[str, float]:
    """What the steps said themselves: the reward model's accuracy, and step 3's held-out scores."""
    log = (output_dir / "reward_eval.log").read_text(encoding="utf-8").splitlines()
    [*_, figures] = [line for line in log if line.startswith('{"accuracy"')]  # of rw_eval.py, its last line
    curves = read_run(output_dir / "step3").curves
    scores = curves["eval/score"].values
    return {
        "reward_accuracy": json.loads(figures)["accuracy"],
        "score_before": scores[0],
        "score_halfway": scores[len(scores) // 2],
        "score_after": scores[-1],
        "win_rate": curves["eval/win_rate"].last,
    }


def peak_gib(output_dir: Path) -> float:
    """The most memory that this program, or all ranks of a step together, have held."""
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]  # Linux counts KiB
    for folder in output_dir.glob("step?"):
        run = read_run(folder)
        peaks += [run.starts()[-1]["world_size"] * gib for gib in run.curves["perf/peak_memory_gib"].values]
    return max(peaks)


def load_model(path: Path) -> PreTrainedModel:
    """The model of a folder in fp32, ready to be asked."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()


def measure(args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """The numbers of summary.json but time and memory, and the lines to print below the table."""
    inputs, exports = args.output_dir / "inputs", [args.output_dir / f"step{n}" / "export" for n in (1, 3)]
    tokenizer = load_tokenizer(str(exports[0]))
    template = build_template(args.template, tokenizer)
    held_out = load_examples(inputs / "sft" / "eval.jsonl")[: max(args.num_scored, args.num_prompts)]
    asked = random.Random(SEED).sample(held_out, min(args.num_prompts, len(held_out)))
    prompts = [ids[: mask.index(True)] for ids, mask, *_ in tokenise(asked, template)]
    eval_rows = tokenise(held_out[: args.num_scored], template)
    train_rows = tokenise(load_examples(inputs / "sft" / "train.jsonl"), template)

    messages = [example.prompt[-1].content for example in asked]
    is_odd = [len(message.split()) not in SHOWN_WORDS for message in messages]
    shown = sorted(range(len(asked)), key=is_odd.__getitem__)[:NUM_SHOWN]
    base, sft, ppo = (load_model(folder) for folder in (inputs / "base", *exports))
    _, base_texts = sample_replies(base, tokenizer, [prompts[i] for i in shown], args.batch_size)
    sft_batches, sft_texts = sample_replies(sft, tokenizer, prompts, args.batch_size)
    ppo_batches, ppo_texts = sample_replies(ppo, tokenizer, prompts, args.batch_size)
    numbers = {
        "unigram_perplexity": unigram_perplexity(train_rows, eval_rows, len(tokenizer)),
        "sft_perplexity": model_perplexity(sft, eval_rows, args.batch_size),
        **read_evaluations(args.output_dir),
        "vader_sft": mean_sentiment(sft_texts),
        "vader_ppo": mean_sentiment(ppo_texts),
        "kl": mean_kl(ppo, sft, ppo_batches),
        "distinct2_sft": distinct_2(sft_texts),
        "distinct2_ppo": distinct_2(ppo_texts),
        "words_sft": mean_words(sft_texts),
        "words_ppo": mean_words(ppo_texts),
    }
    finished = [
        sum(int((b.input_ids.eq(tokenizer.eos_token_id) & b.response_mask).sum()) for b in batches)
        for batches in (sft_batches, ppo_batches)
    ]
    lines = [
        f"{len(prompts)} held-out prompts, one reply each of at most {MAX_RESPONSE_TOKENS} tokens; ended by "
        f"themselves: SFT {finished[0] / len(prompts):.1%}, PPO {finished[1] / len(prompts):.1%}"
    ]
    for number, i in enumerate(shown):
        replies = {"base": base_texts[number], "SFT": sft_texts[i], "PPO": ppo_texts[i]}
        # A sampled line break would look like another reply.
        lines += ["", f"Human: {messages[i]}"]
        lines += [f"  {name:<4}  {' '.join(text.split())}" for name, text in replies.items()]
    return numbers, lines


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("output_dir", type=Path, help="folder that run_demo.sh filled; summary.json goes there")
    add("--template", default="human_assistant", help="as in the three steps")
    add("--num_prompts", type=int, default=512, help="held-out prompts, one reply each by SFT and PPO model")
    add("--num_scored", type=int, default=2000, help="held-out replies in the perplexities, at most")
    add("--batch_size", type=int, default=64, help="sequences a forward pass")
    add("--started_at", type=float, default=time.time(), help="unix time the demo began")
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints, and writes summary.json."""
    quiet_libraries()
    args = parse_args()
    numbers, lines = measure(args)
    summary = {"seconds": time.time() - args.started_at, "peak_gib": peak_gib(args.output_dir), **numbers}
    print("\n".join([*format_summary(summary), "", *lines]))
    (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
