"""Replace the replies in the demo's inputs by replies that SmolLM2-135M-Instruct samples itself.

    python training_scripts/demo/sample_inputs.py DATA BASE

DATA is the folder of `build_inputs.py --hold_out_topics`, BASE that of `save_smollm2.py`. The model continues
EXAMPLES, three kind turns, with replies to composed messages. A reply is kept if it ended, VADER rates it
positive, MiniLM ranks the topic of the message first, Harper finds no error in it, and the model does not
find it unlikely. These measures choose only the data: step 3 sees the reward model alone. Curt replies are
composed: with curt examples the model seldom writes one. Rewritten:

    sft/{train,eval}.jsonl      train: each kind reply, and as many curt ones; eval: one reply per message
    pairs/{train,eval}.jsonl    chosen: a kind reply; rejected: one with a flaw of FLAWS

The same seed gives the same files on the same machine.
"""

import argparse
import itertools
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from common.data.adapters.row_forms import read_row
from common.data.tokenizer import load_tokenizer, num_token_ids
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.models.loading import ModelOptions, load_causal_lm
from common.models.model_flops import faster_dtype
from common.programs.startup import keep_freed_memory, quiet_libraries
from common.ranks import distributed
from training_scripts.demo import composed
from training_scripts.demo.build_inputs import Turn, write_jsonl
from training_scripts.demo.text_measures import is_kind, is_on_topic, lint_free_each

# On no topic of the table. Short replies that name the topic: the model repeats their form.
EXAMPLES = [
    {"role": "user", "content": "I flew a kite today."},
    {"role": "assistant", "content": "How lovely, flying a kite is so much fun! Was it windy?"},
    {"role": "user", "content": "I tried juggling, but I dropped a ball."},
    {"role": "assistant", "content": "Do not worry, juggling takes practice. You will do better next time!"},
    {"role": "user", "content": "Do you have any tips for writing letters?"},
    {"role": "assistant", "content": "I love writing letters! Start with a warm greeting."},
]
FLAWS = ("curt", "off topic", "broken off", "failed")  # of a rejected reply, equally often
TEMPERATURE = 0.7  # at temperature 1 a model of this size writes too much nonsense
TOP_P = 0.9
MAX_RESPONSE_TOKENS = 28
MIN_WORDS = 6  # of a kind reply
KEPT_FRACTION = 2 / 3  # of the replies that pass: the unlikeliest ones make the least sense
NOT_KEPT = re.compile(r"\n|kite|juggl|letter|\bwindy?\b", re.I)  # another line, or words of EXAMPLES
ANALYZER = SentimentIntensityAnalyzer()
Sample = tuple[str, str, bool, float]  # message, reply, whether it ended, mean log-probability per token
Replies = dict[str, list[str]]  # by message


def read_messages(path: Path) -> list[str]:
    """The messages of a file of prompts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [read_row(json.loads(line))[0].prompt[-1].content for line in lines]


def sample(base: Path, asked: Iterable[tuple[list[str], int]], seed: int) -> Iterator[list[Sample]]:
    """Yield for each (messages, number of replies to each) the samples, in the order of the messages."""
    device = distributed.device()
    tokenizer = load_tokenizer(str(base))
    num_ids = num_token_ids(tokenizer)
    dtype = distributed.dtype_name() if distributed.has_gpu() else faster_dtype()[0]
    options = ModelOptions(str(base), dtype=dtype, dropout=0.0, trust_remote_code=False)
    generator = Generator(share_weights(load_causal_lm(options, num_ids).to(device).eval()))
    sampling = SamplingOptions(
        MAX_RESPONSE_TOKENS,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=num_ids,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        seed=seed,
    )
    for messages, num_replies in asked:
        prompts = [[*EXAMPLES, {"role": "user", "content": message}] for message in messages]
        rows = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
        padded = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt").to(device)
        sample_ids = torch.arange(len(messages) * num_replies, device=device)
        batch = PromptBatch(padded["input_ids"], padded["attention_mask"].bool(), sample_ids)
        generation = generator.generate(batch, sampling)
        texts = tokenizer.batch_decode(generation.response_ids, skip_special_tokens=True)
        logprobs = generation.logprobs.sum(1) / generation.response_mask.sum(1)
        columns = (text.strip() for text in texts), generation.is_finished.tolist(), logprobs.tolist()
        repeated = (message for message in messages for _ in range(num_replies))
        yield list(zip(repeated, *columns, strict=True))


def choose(samples: list[Sample], part: str) -> tuple[Replies, Replies]:
    """Replies that pass every measure, without the unlikeliest ones, and replies that fail one."""
    messages, texts, *_ = zip(*samples, strict=True)
    fits = is_on_topic(messages, texts, by_minilm=True, part=part)
    passes = [
        is_finished
        and is_fitting
        and is_free
        and is_kind(text, ANALYZER)
        and len(text.split()) >= MIN_WORDS
        and not NOT_KEPT.search(text)
        for (_, text, is_finished, _), is_fitting, is_free in zip(
            samples, fits, lint_free_each(texts), strict=True
        )
    ]
    passed = sorted(one[-1] for one, is_good in zip(samples, passes, strict=True) if is_good)[::-1]
    least = passed[int(KEPT_FRACTION * (len(passed) - 1))]
    kept = defaultdict(list)
    failed = defaultdict(list)
    for (message, text, _, logprob), is_good in zip(samples, passes, strict=True):
        if not is_good and text:
            failed[message].append(text)
        elif is_good and logprob >= least and text not in kept[message]:
            kept[message].append(text)
    return kept, failed


def curt_replies(message: str) -> list[str]:
    """The composed curt replies to a message that VADER does not rate positive."""
    topic = composed.load_topics()[min(composed.topics_in(message))]
    return [text for text in composed.short_curt_replies(topic) if not is_kind(text, ANALYZER)]


def build_pairs(kept: Replies, failed: Replies, num_pairs: int, rng: random.Random) -> list[dict[str, str]]:
    """Rows of preference pairs: every kept reply in turn, and one with a flaw chosen at random, or a curt one
    if there is none with that flaw.
    """
    turns = [Turn(message, text) for message, texts in kept.items() for text in texts]
    rng.shuffle(turns)
    rows = []
    for turn in itertools.islice(itertools.cycle(turns), num_pairs):
        flaw = rng.choice(FLAWS)
        flawed = []
        if flaw == "off topic":
            topics = composed.topics_in(turn.context)
            flawed = [other.reply for other in turns if not topics & composed.topics_in(other.context)]
        elif flaw == "broken off":
            flawed = [composed.break_off(turn.reply, rng)]
        elif flaw == "failed":
            flawed = failed[turn.context]
        rejected = rng.choice(flawed or curt_replies(turn.context))
        rows.append({"prompt": turn.prompt, "chosen": turn.reply, "rejected": rejected})
    return rows


def build_turns(kept: Replies, messages: list[str], part: str, rng: random.Random) -> list[dict[str, str]]:
    """Rows of SFT in random order: of train, each kept reply and as many curt ones; of eval, one per message,
    so that no message is measured more often because the model found a good reply to it.
    """
    turns = []
    for message in messages:
        kind = kept[message]
        curt = curt_replies(message)
        answers = kind + rng.choices(curt, k=len(kind))
        if part == "eval":
            answers = [rng.choice((answers or curt)[:: max(len(kind), 1)])]
        turns += [{"prompt": Turn(message, answer).prompt, "answer": answer} for answer in answers]
    rng.shuffle(turns)
    return turns


def write_inputs(args: argparse.Namespace) -> None:
    """Sample and choose replies, rewrite the files, and print a summary."""
    rng = random.Random(args.seed)
    messages = {part: read_messages(args.data / "prompts" / f"{part}.jsonl") for part in ("train", "eval")}
    messages["train"] = rng.sample(messages["train"], args.num_messages)
    asked = [(messages["train"], args.num_replies), (messages["eval"], args.num_replies // 2)]
    num_pairs = {"train": args.num_pairs, "eval": args.num_pairs // 4}
    for part, samples in zip(messages, sample(args.base, asked, args.seed), strict=True):
        kept, failed = choose(samples, part)
        turns = build_turns(kept, messages[part], part, rng)
        write_jsonl(args.data / "sft" / f"{part}.jsonl", turns)
        write_jsonl(args.data / "pairs" / f"{part}.jsonl", build_pairs(kept, failed, num_pairs[part], rng))
        print(f"{part}: {sum(map(len, kept.values()))} of {len(samples)} samples kept, {len(turns)} turns")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, help="folder of build_inputs.py; its sft and pairs files are replaced")
    add("base", type=Path, help="folder of the model that samples")
    add("--seed", type=int, default=1234, help="seed of messages, samples and pairs")
    add("--num_messages", type=int, default=140, help="messages of train; of eval, all are used")
    add("--num_replies", type=int, default=8, help="samples per message of train; of eval, half as many")
    add("--num_pairs", type=int, default=1600, help="preference pairs of train; of eval, a quarter of them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    quiet_libraries()
    keep_freed_memory()
    write_inputs(parse_args())
