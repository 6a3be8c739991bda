"""Build the demo's inputs: composed conversations, or real human ones; needs no model hub.

    python training_scripts/demo/build_inputs.py OUTPUT_DIR [--data human]

writes, deterministically for a --seed:

    sft/{train,eval}.jsonl      {"prompt": "\\n\\nHuman: ...\\n\\nAssistant:", "answer": ...}
    pairs/{train,eval}.jsonl    {"prompt", "chosen", "rejected"}: a kind reply, and one with a flaw, such as
                                curt or off topic; human: two of similar length, by VADER the more positive
                                one chosen
    prompts/{train,eval}.jsonl  {"prompt"}
    base/                       byte-level BPE tokenizer and a small Llama-style model with random weights

A turn is one message and the reply to it. Composed turns: `composed.py`; train and eval share no phrase of a
message. Human turns: the chitchat-dataset package (PyPI, MIT); train and eval share no conversation. VADER:
Hutto and Gilbert 2014 (vaderSentiment, PyPI, MIT).
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from training_scripts.demo import composed

NUM_COMPOSED = {"train": 24000, "eval": 1200}  # turns
EVAL_FRACTION = 0.05  # of the conversations
MAX_WORDS = 20  # of a message or a reply; longer turns are left out
MAX_TURN_TOKENS = 48  # a "word" may have 90 letters, and a batch is padded to its longest row
MIN_GAP = 0.5  # minimum difference of a pair's VADER scores
LENGTH_TOLERANCE = 1  # maximum difference of a pair's lengths in tokens
MAX_CANDIDATES = 16  # waiting replies that a reply is compared with: bounds the search, rarely reached
VOCAB_SIZE = 2048  # of the tokenizer, including its two special tokens
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
# GPT-2's pattern after the dialogue's markers, each of which thus becomes one token instead of four.
_PIECES = (
    r"\n\n(?:Human|Assistant):"
    r"|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


class Turn(NamedTuple):
    """One human message and the human reply to it, whitespace normalised."""

    context: str
    reply: str

    @property
    def prompt(self) -> str:
        """The prompt in hh-rlhf's own form; the reply follows after one space."""
        return f"\n\nHuman: {self.context}\n\nAssistant:"


def load_conversations() -> list[tuple[str, ...]]:
    """Every distinct conversation of chitchat-dataset in its stored order, with normalised white space."""
    import chitchat_dataset

    conversations = {}  # a dict, for the order; a conversation in both train and eval would leak
    for messages in chitchat_dataset.ConversationDataset():
        normalised = (" ".join(message.split()) for message in messages)
        conversations[tuple(filter(None, normalised))] = None
    return list(conversations)


def turns_of(conversations: Iterable[tuple[str, ...]]) -> list[Turn]:
    """The distinct turns whose context and reply are within the word limit, in order of appearance."""
    pairs = (pair for messages in conversations for pair in itertools.pairwise(messages))
    return list(
        dict.fromkeys(Turn(*pair) for pair in pairs if max(len(t.split()) for t in pair) <= MAX_WORDS)
    )


def split_by_conversation(seed: int) -> dict[str, list[Turn]]:
    """Shuffled `train` and `eval` turns; conversations are split as a whole: no eval text is trained on."""
    conversations = load_conversations()
    rng = random.Random(seed)
    rng.shuffle(conversations)
    num_eval = round(len(conversations) * EVAL_FRACTION)
    parts = {"train": turns_of(conversations[num_eval:]), "eval": turns_of(conversations[:num_eval])}
    for part in parts.values():
        rng.shuffle(part)
    return parts


def compose(seed: int, *, hold_out_topics: bool) -> dict[str, list[Turn]]:
    """Composed `train` and `eval` turns; no phrase of an eval message is trained on."""
    return {
        part: [
            Turn(*turn) for turn in composed.compose_turns(part, count, seed, hold_out_topics=hold_out_topics)
        ]
        for part, count in NUM_COMPOSED.items()
    }


def compose_pairs(part: str, num_pairs: int, seed: int, *, hold_out_topics: bool) -> list[dict[str, str]]:
    """Rows of composed preference pairs."""
    return [
        {"prompt": Turn(message, chosen).prompt, "chosen": chosen, "rejected": rejected}
        for message, chosen, rejected in composed.compose_pairs(
            part, num_pairs, seed, hold_out_topics=hold_out_topics
        )
    ]


def build_tokenizer(turns: Iterable[Turn]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with an end and a separate padding token, without BOS; text is unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{turn.prompt} {turn.reply}" for turn in turns), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def build_base_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama-style model of 2.2 million random fp32 weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def pair_by_sentiment(
    scores: Sequence[float], lengths: Sequence[int], max_pairs: int, seed: int
) -> list[tuple[int, int, int]]:
    """Pairs of replies: indexes of the better one, of the other, and of the one whose prompt is used.

    Each reply is used at most once. The two lengths differ by at most LENGTH_TOLERANCE, the scores by at
    least MIN_GAP. The prompt is that of either reply with equal probability, so whether a reply fits its
    prompt does not reveal the label. The same seed gives the same pairs, in random order.
    """
    rng = random.Random(seed)
    order = list(range(len(scores)))
    rng.shuffle(order)
    waiting: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=MAX_CANDIDATES))
    pairs: list[tuple[int, int, int]] = []
    for index in order:
        # Lengths within a class differ by at most LENGTH_TOLERANCE.
        class_waiting = waiting[lengths[index] // (LENGTH_TOLERANCE + 1)]
        other = next((i for i in class_waiting if abs(scores[index] - scores[i]) >= MIN_GAP), None)
        if other is None:
            class_waiting.append(index)
            continue
        class_waiting.remove(other)
        chosen, rejected = (index, other) if scores[index] > scores[other] else (other, index)
        pairs.append((chosen, rejected, rng.choice((chosen, rejected))))
        if len(pairs) == max_pairs:
            break
    rng.shuffle(pairs)
    return pairs


def build_pairs(
    turns: list[Turn], num_pairs: int, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[dict[str, str]]:
    """Rows of preference pairs."""
    # A third of the replies find no partner. VADER is slow, so only the needed turns are scored.
    turns = turns[: 3 * num_pairs]
    analyzer = SentimentIntensityAnalyzer()
    scores = [analyzer.polarity_scores(turn.reply)["compound"] for turn in turns]
    lengths = [len(ids) for ids in tokenizer([f" {turn.reply}" for turn in turns])["input_ids"]]
    return [
        {"prompt": turns[prompt].prompt, "chosen": turns[chosen].reply, "rejected": turns[rejected].reply}
        for chosen, rejected, prompt in pair_by_sentiment(scores, lengths, num_pairs, seed)
    ]


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write one JSON object per line, creating the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_inputs(args: argparse.Namespace) -> None:
    """Write all inputs below `args.output_dir` and print a summary."""
    started = time.perf_counter()
    is_composed = args.data == "composed"
    held_out = {"hold_out_topics": args.hold_out_topics}
    parts = compose(args.seed, **held_out) if is_composed else split_by_conversation(args.seed)
    tokenizer = build_tokenizer(parts["train"])
    for part, num_pairs in (("train", args.num_train_pairs), ("eval", args.num_eval_pairs)):
        rows = tokenizer([f"{turn.prompt} {turn.reply}{END_OF_TEXT}" for turn in parts[part]])["input_ids"]
        turns = [turn for turn, ids in zip(parts[part], rows, strict=True) if len(ids) <= MAX_TURN_TOKENS]
        answers = [{"prompt": turn.prompt, "answer": turn.reply} for turn in turns]
        write_jsonl(args.output_dir / "sft" / f"{part}.jsonl", answers)
        prompts = dict.fromkeys(turn.prompt for turn in turns)
        write_jsonl(args.output_dir / "prompts" / f"{part}.jsonl", ({"prompt": prompt} for prompt in prompts))
        pairs = (
            compose_pairs(part, num_pairs, args.seed, **held_out)
            if is_composed
            else build_pairs(turns, num_pairs, tokenizer, args.seed)
        )
        write_jsonl(args.output_dir / "pairs" / f"{part}.jsonl", pairs)
        print(f"{part}: {len(turns)} turns, {len(prompts)} prompts, {len(pairs)} pairs")
    if not args.skip_base_model:
        model = build_base_model(tokenizer, args.seed)
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
    add("--data", choices=("composed", "human"), default="composed", help="whose conversations")
    add("--seed", type=int, default=1234, help="seed of split, pairs and random weights")
    add("--num_train_pairs", type=int, default=12000, help="maximum preference pairs for training")
    add("--num_eval_pairs", type=int, default=1000, help="maximum held-out preference pairs")
    add("--hold_out_topics", action="store_true", help="use composed topics in eval that train lacks")
    add("--skip_base_model", action="store_true", help="write only the data, for use with another base model")
    return parser.parse_args(argv)


if __name__ == "__main__":
    write_inputs(parse_args())
