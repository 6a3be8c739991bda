"""Measure the results of the demo's three steps on held-out conversations, and print them with the aims.

    python training_scripts/demo/measure.py OUTPUT_DIR [--data human]

OUTPUT_DIR is the output of run_demo.sh: inputs/, step1/, step3/, reward_eval.log. Accuracy, scores, win rate
and KL were measured by the steps on held-out rows; the rest is measured here by plain forward passes and
plain `model.generate` in fp32, and by `text_measures.py`, which no step trains on, but which chose the data
of `sample_inputs.py`. Prints one table and five held-out prompts with the replies of the three models, and
writes OUTPUT_DIR/summary.json and replies.md. The exit status is 0 whether or not an aim is met.
"""

import argparse
import json
import math
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.data.adapters.row_forms import read_row
from common.data.chat_template import build_template
from common.data.dialogue import Template, Tokenised
from common.data.example import Example
from common.data.packed_batch import pad_rows
from common.data.tokenizer import load_tokenizer
from common.programs.startup import quiet_libraries
from tools.report.run_reader import read_run
from training_scripts.demo.build_inputs import load_conversations, turns_of
from training_scripts.demo.save_smollm2 import find_smollm2
from training_scripts.demo.text_measures import distinct_2, is_kind, is_on_topic, lint_free, load_fluency

SEED = 1234
MAX_RESPONSE_TOKENS = 40  # as in step 3
LIMITS = {  # seconds, GiB, on two CPU cores; how far PPO's kind replies on topic exceed SFT's
    "small": {"seconds": 480, "gib": 4, "target": 0.25},
    "smollm2": {"seconds": 1500, "gib": 10, "target": 0.35},
}
NUM_SHOWN = 5
NUM_LISTED = 40  # in replies.md
SHOWN_WORDS = range(4, 13)  # per prompt, to fit on a line

# Key of summary.json: description, decimals shown, the aim that `missed_aims` checks.
NUMBERS = {
    "unigram_perplexity": ("perplexity of held-out replies, unigram model", 1, ""),
    "sft_perplexity": (
        "perplexity of held-out replies, SFT model",
        1,
        "under an eighth of unigram",
    ),
    "reward_accuracy": ("reward model, accuracy on held-out pairs", 3, "at least 0.85"),
    "score_before": ("reward model's score of held-out prompts, SFT model", 3, ""),
    "score_halfway": ("reward model's score of held-out prompts, half-way", 3, ""),
    "score_after": ("reward model's score of held-out prompts, PPO model", 3, ""),
    "win_rate": ("PPO's replies scored above SFT's, held-out prompts", 3, "at least 0.6"),
    "target_sft": ("replies that are kind and on topic, SFT model", 3, ""),
    "target_ppo": (
        "replies that are kind and on topic, PPO model",
        3,
        "at least {target} above the SFT model's",
    ),
    "fluency_human": ("log-probability of human replies, nats per token", 2, ""),
    "fluency_sft": ("log-probability of the SFT model's replies", 2, ""),
    "fluency_ppo": ("log-probability of the PPO model's replies", 2, "at least that of human ones"),
    "lint_free_sft": ("replies in which a grammar checker finds nothing, SFT model", 3, ""),
    "lint_free_ppo": ("replies in which a grammar checker finds nothing, PPO model", 3, "at least 0.9"),
    "kl": ("KL to the SFT model, nats per reply", 2, "at most 10"),
    "distinct2_sft": ("distinct-2 (different word pairs), SFT model", 3, ""),
    "distinct2_ppo": ("distinct-2 (different word pairs), PPO model", 3, "at least half the SFT model's"),
    "words_sft": ("words per reply, SFT model", 2, ""),
    "words_ppo": ("words per reply, PPO model", 2, "at least 0.6 of the SFT model's"),
    "seconds": ("seconds, all of it", 0, "at most {seconds}"),
    "peak_gib": ("peak memory, GiB", 2, "at most {gib}"),
}


def missed_aims(s: Mapping[str, float], size: str = "small") -> list[str]:
    """Keys of the summary's numbers that miss their aim; NaN misses every aim."""
    limits = LIMITS[size]
    is_met = {
        "sft_perplexity": s["sft_perplexity"] < s["unigram_perplexity"] / 8,
        "reward_accuracy": s["reward_accuracy"] >= 0.85,
        "win_rate": s["win_rate"] >= 0.6,
        "target_ppo": s["target_ppo"] >= s["target_sft"] + limits["target"],
        "fluency_ppo": s["fluency_ppo"] >= s["fluency_human"],
        "lint_free_ppo": s["lint_free_ppo"] >= 0.9,
        "kl": s["kl"] <= 10,
        "distinct2_ppo": s["distinct2_ppo"] >= 0.5 * s["distinct2_sft"],
        "words_ppo": s["words_ppo"] >= 0.6 * s["words_sft"],
        "seconds": s["seconds"] <= limits["seconds"],
        "peak_gib": s["peak_gib"] <= limits["gib"],
    }
    return [key for key in is_met if not is_met[key]]


def format_summary(summary: Mapping[str, float], size: str = "small") -> list[str]:
    """The table, one number per line, with its aim and met or missed."""
    missed = missed_aims(summary, size)
    width = max(len(label) for label, *_ in NUMBERS.values())
    rows = []
    for key, (label, decimals, aim) in NUMBERS.items():
        row = f"{label:<{width}}  {summary[key]:>8.{decimals}f}"
        if aim:
            row += f"  {'missed' if key in missed else 'met':<6}  aim: {aim.format_map(LIMITS[size])}"
        rows.append(row)
    return rows


def tokenise(path: Path, template: Template) -> tuple[list[Example], list[Tokenised]]:
    """Rows of a file of build_inputs.py: prompts and replies, and their token ids as in step 1."""
    lines = path.read_text(encoding="utf-8").splitlines()
    examples = [read_row(json.loads(line))[0] for line in lines]
    rows = template.tokenise_batch([template.segments(one.prompt, one.chosen) for one in examples])
    return examples, rows


@torch.no_grad()
def model_perplexity(model: PreTrainedModel, rows: Sequence[Tokenised], batch_size: int) -> float:
    """Perplexity per response token, end token included: every token has the same weight."""
    rows = sorted(rows, key=lambda row: len(row.input_ids))
    loss, num_tokens = 0.0, 0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        input_ids, is_token = (x.to(model.device) for x in pad_rows([row.input_ids for row in batch], 0))
        is_target = pad_rows([row.response_mask for row in batch], 0)[0].bool().to(model.device)
        labels = torch.where(is_target, input_ids, -100)
        count = int(is_target[:, 1:].sum())
        loss += count * model(input_ids, attention_mask=is_token.long(), labels=labels).loss.item()
        num_tokens += count
    return math.exp(loss / num_tokens)


def unigram_perplexity(
    train_rows: Sequence[Tokenised], eval_rows: Sequence[Tokenised], vocab_size: int
) -> float:
    """Perplexity per response token of eval rows under the train rows' frequencies, with add-one smoothing.

    Without smoothing, a token that is in no train row would make the perplexity infinite.
    """
    train, held_out = (
        Counter(t for row in rows for t, is_in in zip(row.input_ids, row.response_mask, strict=True) if is_in)
        for rows in (train_rows, eval_rows)
    )
    total = train.total() + vocab_size
    log_likelihood = sum(count * math.log((train[token] + 1) / total) for token, count in held_out.items())
    return math.exp(-log_likelihood / held_out.total())


def sample_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    batch_size: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> list[str]:
    """One reply per prompt; by default sampled from the whole distribution, as in step 3."""
    torch.manual_seed(SEED)
    texts = []
    for first in range(0, len(prompts), batch_size):
        rows = {"input_ids": prompts[first : first + batch_size]}
        inputs = tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(model.device)
        ids = model.generate(
            **inputs,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=top_p,
            max_new_tokens=MAX_RESPONSE_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        replies = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        texts += [reply.strip() for reply in replies]
    return texts


def read_evaluations(output_dir: Path) -> dict[str, float]:
    """Results from the steps' own logs: the reward model's accuracy, and step 3's evaluations."""
    log = (output_dir / "reward_eval.log").read_text(encoding="utf-8").splitlines()
    [*_, figures] = [line for line in log if line.startswith('{"accuracy"')]  # the last line of rw_eval.py
    curves = read_run(output_dir / "step3").curves
    scores = curves["eval/score"].values
    return {
        "reward_accuracy": json.loads(figures)["accuracy"],
        "score_before": scores[0],
        "score_halfway": scores[len(scores) // 2],
        "score_after": scores[-1],
        "win_rate": curves["eval/win_rate"].last,
        "kl": curves["eval/kl"].last,
    }


def peak_gib(output_dir: Path) -> float:
    """Peak memory in GiB of this program, or of all ranks of a step together, whichever is larger."""
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]  # Linux counts KiB
    for folder in output_dir.glob("step?"):
        run = read_run(folder)
        peaks += [run.starts[-1]["world_size"] * gib for gib in run.curves["perf/peak_memory_gib"].values]
    return max(peaks)


def load_model(name: str | Path) -> PreTrainedModel:
    """The model of a folder or of the hub in fp32, in eval mode."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
    return model.to(device).eval()


def measure(args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """The numbers of summary.json except time and memory, and the lines to print below the table."""
    inputs = args.output_dir / "inputs"
    exports = [args.output_dir / f"step{n}" / "export" for n in (1, 3)]
    tokenizer = load_tokenizer(str(exports[0]))
    template = build_template(args.template, tokenizer)
    examples, held_out = tokenise(inputs / "sft" / "eval.jsonl", template)
    train_examples, train_rows = tokenise(inputs / "sft" / "train.jsonl", template)
    eval_rows = held_out[: args.num_scored]
    num_known = min(max(args.num_scored, args.num_prompts), len(examples))
    asked = random.Random(SEED).sample(range(num_known), min(args.num_prompts, num_known))
    prompts = [held_out[i].input_ids[: held_out[i].response_mask.index(True)] for i in asked]
    messages = [examples[i].prompt[-1].content for i in asked]
    is_odd = [len(message.split()) not in SHOWN_WORDS for message in messages]
    shown = sorted(range(len(asked)), key=is_odd.__getitem__)[:NUM_SHOWN]

    base, sft, ppo = (load_model(model) for model in (inputs / "base", *exports))
    sampling = args.batch_size, args.temperature, args.top_p
    base_texts = sample_replies(base, tokenizer, [prompts[i] for i in shown], *sampling)
    sft_texts = sample_replies(sft, tokenizer, prompts, *sampling)
    ppo_texts = sample_replies(ppo, tokenizer, prompts, *sampling)
    numbers = {
        "unigram_perplexity": unigram_perplexity(train_rows, eval_rows, len(tokenizer)),
        "sft_perplexity": model_perplexity(sft, eval_rows, args.batch_size),
        **read_evaluations(args.output_dir),
    }
    analyzer = SentimentIntensityAnalyzer()
    judge, fluency = load_fluency(example.chosen for example in train_examples)
    replies = [example.chosen for example in examples]
    if args.data == "composed" and find_smollm2():  # trigrams only know the composed data
        replies = [turn.reply for turn in turns_of(load_conversations())]
    numbers["fluency_human"] = fluency(replies[: args.num_judged])
    for name, texts in (("sft", sft_texts), ("ppo", ppo_texts)):
        on_topic = is_on_topic(messages, texts, args.size == "smollm2") if args.data == "composed" else texts
        numbers[f"target_{name}"] = fmean(
            is_kind(text, analyzer) and bool(fits) for text, fits in zip(texts, on_topic, strict=True)
        )
        numbers[f"fluency_{name}"] = fluency(texts[: args.num_judged])
        numbers[f"lint_free_{name}"] = lint_free(texts)
        numbers[f"distinct2_{name}"] = distinct_2(texts)
        numbers[f"words_{name}"] = fmean(len(text.split()) for text in texts)
    cells = list(zip(messages, sft_texts, ppo_texts, strict=True))[:NUM_LISTED]
    rows = [f"| {' | '.join(' '.join(cell.split()) for cell in row)} |\n" for row in cells]
    table = "".join(["| held-out message | SFT | PPO |\n", "|---|---|---|\n", *rows])
    (args.output_dir / "replies.md").write_text(table, encoding="utf-8")
    lines = [f"{len(prompts)} held-out prompts, one reply each of at most {MAX_RESPONSE_TOKENS} tokens"]
    lines += [f"sampled at temperature {args.temperature}, top-p {args.top_p}"]
    lines += [f"log-probabilities by {judge}, of {args.num_judged} replies; kind: positive by VADER"]
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
    add("output_dir", type=Path, help="folder written by run_demo.sh; summary.json is added to it")
    add("--size", choices=tuple(LIMITS), default="small", help="size of the model")
    add("--template", default="human_assistant", help="template of the three steps")
    add(
        "--num_prompts",
        type=int,
        default=512,
        help="held-out prompts, with a reply of each model",
    )
    add("--data", choices=("composed", "human"), default="composed", help="data made by build_inputs.py")
    add("--num_judged", type=int, default=96, help="replies per kind whose fluency is measured")
    add("--num_scored", type=int, default=2000, help="maximum held-out replies for the perplexities")
    add("--temperature", type=float, default=1.0, help="sampling temperature of the replies")
    add(
        "--top_p",
        type=float,
        default=1.0,
        help="sample from the smallest set of this probability",
    )
    add("--batch_size", type=int, default=64, help="sequences per forward pass")
    add("--started_at", type=float, default=time.time(), help="unix time at which the demo began")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, and write summary.json."""
    quiet_libraries()
    args = parse_args()
    numbers, lines = measure(args)
    summary = {"seconds": time.time() - args.started_at, "peak_gib": peak_gib(args.output_dir), **numbers}
    print("\n".join([*format_summary(summary, args.size), "", *lines]))
    (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
