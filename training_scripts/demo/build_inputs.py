"""Build the demo's inputs from real human conversations; no model hub is asked.

    python training_scripts/demo/build_inputs.py OUTPUT_DIR

writes, always the same for one --seed:

    sft/{train,eval}.jsonl      {"prompt": "\\n\\nHuman: ...\\n\\nAssistant:", "answer": ...}
    pairs/{train,eval}.jsonl    {"prompt", "chosen", "rejected"}: two human replies of like length, the more
                                positive one by the VADER lexicon is the chosen one
    prompts/{train,eval}.jsonl  {"prompt"}
    base/                       byte-level BPE tokenizer and a small Llama-style model with random weights

Source: the chitchat-dataset package (PyPI, MIT). A turn is one message and the reply to it; train and eval
share no conversation. VADER: Hutto and Gilbert 2014 (vaderSentiment, PyPI, MIT).
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import chitchat_dataset
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from training_scripts.demo.preference_pairs import length_rule_accuracy, pair_by_sentiment
from training_scripts.demo.turns import Turn, format_prompt

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
# GPT-2's own pattern, after the dialogue's markers: each of these becomes one token instead of four.
_PIECES = (
    r"\n\n(?:Human|Assistant):"
    r"|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """Turns of disjoint sets of conversations."""

    train: list[Turn]
    eval: list[Turn]


def load_conversations() -> list[tuple[str, ...]]:
    """Every distinct conversation of chitchat-dataset in its stored order, messages whitespace normalised."""
    conversations = {}  # a dict keeps the order; the same conversation in train and eval would leak
    for messages in chitchat_dataset.ConversationDataset():
        normalised = (" ".join(message.split()) for message in messages)
        conversations[tuple(message for message in normalised if message)] = None
    return list(conversations)


def turns_of(
    conversations: Iterable[tuple[str, ...]], max_context_words: int, max_reply_words: int
) -> list[Turn]:
    """The distinct turns whose context and reply are within the word limits, in order of appearance."""
    turns = {}
    for conversation in conversations:
        for context, reply in zip(conversation, conversation[1:], strict=False):
            if len(context.split()) <= max_context_words and len(reply.split()) <= max_reply_words:
                turns[Turn(context, reply)] = None
    return list(turns)


def split_by_conversation(args: argparse.Namespace) -> Split:
    """Train and eval turns, each shuffled; whole conversations are dealt out: no eval text is trained on."""
    conversations = load_conversations()
    rng = random.Random(args.seed)
    rng.shuffle(conversations)
    num_eval = round(len(conversations) * args.eval_fraction)
    parts = [
        turns_of(part, args.max_context_words, args.max_reply_words)
        for part in (conversations[num_eval:], conversations[:num_eval])
    ]
    for part in parts:
        rng.shuffle(part)
    return Split(*parts)


def build_tokenizer(turns: Iterable[Turn], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with an end and a separate padding token, no bos; no text is changed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"{format_prompt(turn.context)} {turn.reply}" for turn in turns)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def within_token_limit(turns: list[Turn], tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> list[Turn]:
    """The turns whose prompt, reply and end token are `max_tokens` at most: a 'word' may be 90 letters."""
    texts = [f"{format_prompt(turn.context)} {turn.reply}{END_OF_TEXT}" for turn in turns]
    lengths = (len(ids) for ids in tokenizer(texts)["input_ids"])
    return [turn for turn, length in zip(turns, lengths, strict=True) if length <= max_tokens]


def build_base_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama-style model with random fp32 weights drawn from --seed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(config)


def build_pairs(
    turns: list[Turn],
    num_pairs: int,
    tokenizer: PreTrainedTokenizerFast,
    analyzer: SentimentIntensityAnalyzer,
    args: argparse.Namespace,
) -> tuple[list[dict[str, str]], tuple[float, float]]:
    """Rows of preference pairs, and the accuracies of 'the longer wins' and 'the shorter wins' among them."""
    # A third of the replies waits in vain for a partner; only what is needed is scored, VADER is slow.
    turns = turns[: 3 * num_pairs]
    scores = [analyzer.polarity_scores(turn.reply)["compound"] for turn in turns]
    lengths = [len(ids) for ids in tokenizer([f" {turn.reply}" for turn in turns])["input_ids"]]
    pairs = pair_by_sentiment(
        scores,
        lengths,
        min_gap=args.min_gap,
        length_tolerance=args.length_tolerance,
        seed=args.seed,
        max_pairs=num_pairs,
    )
    rows = [
        {
            "prompt": format_prompt(turns[pair.prompt].context),
            "chosen": turns[pair.chosen].reply,
            "rejected": turns[pair.rejected].reply,
        }
        for pair in pairs
    ]
    chosen_lengths = [lengths[pair.chosen] for pair in pairs]
    return rows, length_rule_accuracy(chosen_lengths, [lengths[pair.rejected] for pair in pairs])


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Writes one JSON object a line, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_inputs(args: argparse.Namespace) -> None:
    """Writes all inputs below `args.output_dir` and prints what was made."""
    started = time.perf_counter()
    split = split_by_conversation(args)
    tokenizer = build_tokenizer(split.train, args.vocab_size)
    analyzer = SentimentIntensityAnalyzer()
    num_pairs = {"train": args.num_train_pairs, "eval": args.num_eval_pairs}
    for part, turns in (("train", split.train), ("eval", split.eval)):
        turns = within_token_limit(turns, tokenizer, args.max_turn_tokens)
        answers = [{"prompt": format_prompt(turn.context), "answer": turn.reply} for turn in turns]
        write_jsonl(args.output_dir / "sft" / f"{part}.jsonl", answers)
        prompts = dict.fromkeys(row["prompt"] for row in answers)
        write_jsonl(args.output_dir / "prompts" / f"{part}.jsonl", ({"prompt": prompt} for prompt in prompts))
        pairs, (longer_wins, shorter_wins) = build_pairs(turns, num_pairs[part], tokenizer, analyzer, args)
        write_jsonl(args.output_dir / "pairs" / f"{part}.jsonl", pairs)
        print(
            f"{part}: {len(turns)} turns, {len(prompts)} prompts, {len(pairs)} pairs "
            f"(the longer wins {longer_wins:.3f}, the shorter wins {shorter_wins:.3f})"
        )
    if not args.skip_base_model:
        model = build_base_model(tokenizer, args)
        model.save_pretrained(args.output_dir / "base")
        tokenizer.save_pretrained(args.output_dir / "base")
        print(f"base: {model.num_parameters() / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}")
    print(f"inputs in {args.output_dir}: {time.perf_counter() - started:.1f} s")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("output_dir", type=Path, help="folder to write; files of an earlier run are replaced")
    add("--seed", type=int, default=1234, help="of split, pairs and random weights")
    add("--eval_fraction", type=float, default=0.05, help="share of the conversations held out")
    add("--max_context_words", type=int, default=20, help="turns with a longer message are left out")
    add("--max_reply_words", type=int, default=20, help="turns with a longer reply are left out")
    add(
        "--max_turn_tokens",
        type=int,
        default=48,
        help="longer turns are left out: a batch pads to its longest",
    )
    add("--num_train_pairs", type=int, default=12000, help="preference pairs for training, at most")
    add("--num_eval_pairs", type=int, default=1000, help="preference pairs held out, at most")
    add("--min_gap", type=float, default=0.4, help="least difference of the two VADER scores of a pair")
    add(
        "--length_tolerance",
        type=int,
        default=1,
        help="greatest difference in tokens of a pair's two replies",
    )
    add("--skip_base_model", action="store_true", help="write the data only: another base model is used")
    add("--vocab_size", type=int, default=2048, help="of the tokenizer, its two special tokens included")
    add("--hidden_size", type=int, default=192, help="of the base model")
    add("--intermediate_size", type=int, default=512, help="of the base model's MLP")
    add("--num_layers", type=int, default=4, help="of the base model")
    add("--num_heads", type=int, default=4, help="attention heads of the base model")
    return parser.parse_args(argv)


if __name__ == "__main__":
    write_inputs(parse_args())
