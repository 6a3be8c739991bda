"""Conversations composed from a table of topics: a message, and a kind or a curt reply.

`topics.tsv` has one topic per line: an activity, its past tense, how it went well or badly, a tip, a joy, a
question. A message is a phrase of an intent filled with a topic's words; a reply has one sentence from each
part of a kind or a curt reply. The last phrases of each intent are held out from training.
"""

import csv
import functools
import itertools
import random
import re
from pathlib import Path

# Phrases of a message by intent; below, the parts of a kind reply by intent, and of a curt reply.
MESSAGES = {
    "news": [
        "I {did} today.",
        "Guess what, I {did}!",
        "I finally {did}.",
        "Yesterday I {did}.",
        "I {did}, and {good}.",
        "I {did} last weekend. {Good}!",
        "I {did} with my brother.",
        "You know what? I {did}.",
        "Last night I {did}.",
        "Hey, I {did} this morning!",
    ],
    "trouble": [
        "I {did}, but {bad}.",
        "I {did} today. Sadly, {bad}.",
        "I tried {doing}, and {bad}.",
        "{Bad}. What did I do wrong?",
        "I had a bad day. {Bad}.",
        "Oh no, {bad}!",
        "I like {doing}, but {bad}.",
        "{Bad}. Has that happened to you?",
        "I {did} this week, and then {bad}.",
    ],
    "advice": [
        "How do I get better at {doing}?",
        "Do you have any tips for {doing}?",
        "I am new to {doing}. Where do I start?",
        "I want to learn more about {doing}.",
        "What is the secret of {doing}?",
        "What should I know about {doing}?",
        "Please tell me about {doing}.",
        "I am not good at {doing}. What can I do?",
        "Can you help me with {doing}?",
    ],
    "opinion": [
        "Do you like {doing}?",
        "What do you think about {doing}?",
        "I am thinking about {doing}.",
        "My friend talks about {doing} all day.",
        "I have never tried {doing}.",
        "Would you spend a day on {doing}?",
        "People say good things about {doing}.",
        "Is {doing} any fun?",
    ],
}
KIND = {
    "news": [
        [
            "That sounds wonderful!",
            "How lovely!",
            "Good for you!",
            "I am so happy for you!",
            "That is great!",
            "What a beautiful day you had!",
        ],
        ["There is nothing like {joy}.", "I love {joy}.", "Nothing beats {joy}.", "You must enjoy {joy}."],
        ["{ask}", "{ask}", "{ask}", "I hope you do it again soon.", "You can be proud of yourself."],
    ],
    "trouble": [
        [
            "I am sorry to hear that.",
            "Oh no, that is a pity!",
            "Do not worry.",
            "That happens to all of us.",
            "I feel with you.",
        ],
        ["Next time, {tip}.", "It helps to {tip}.", "My best tip: {tip}.", "From now on, {tip}."],
        ["You will do better soon!", "I believe in you!", "Do not give up, you can do it!", "Good luck!"],
    ],
    "advice": [
        ["I am glad to help!", "What a great question!", "I am happy to help!", "With pleasure!"],
        ["It helps to {tip}.", "My best tip: {tip}.", "First of all, {tip}.", "Here is what I do: {tip}."],
        [
            "Have fun with it!",
            "You will love {joy}.",
            "Good luck, you will do great!",
            "Soon you will enjoy {joy}.",
        ],
    ],
    "opinion": [
        ["Oh yes, I love it!", "I think it is great!", "It makes me happy.", "What a lovely thing!"],
        [
            "There is nothing like {joy}.",
            "Nothing beats {joy}.",
            "Who would not enjoy {joy}?",
            "I love {joy}.",
        ],
        ["Give it a try, you will love it!", "I hope you have fun!", "If you try it, {tip}.", "Enjoy it!"],
    ],
}
CURT = [
    ["So what?", "I do not care.", "Whatever.", "Leave me alone.", "Not now."],
    ["I am tired of {doing}.", "I do not like {doing}.", "I never cared about {doing}.", "Forget {doing}."],
    [
        "Ask somebody else.",
        "I have no time for this.",
        "That is your problem.",
        "It is a waste of time.",
        "It never ends well.",
    ],
    ["Do not bother me again.", "Go away.", "I have other things to do.", "Now let me be."],
]
NUM_HELD_OUT = 2  # the last phrases of each intent
NUM_HELD_OUT_TOPICS = 12  # the last ones of the table, if topics are held out too
KIND_FRACTION = 0.5  # of the replies that SFT trains on
FLAWS = ("curt", "off topic", "broken off", "too long")  # of a rejected reply, equally often
MIN_WORDS = 4  # of a reply that is broken off
TOPICS = Path(__file__).with_name("topics.tsv")


@functools.cache
def load_topics() -> list[dict[str, str]]:
    """The words of each topic by column."""
    with TOPICS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def fill(phrase: str, topic: dict[str, str]) -> str:
    """A phrase filled with a topic's words; a column with a capital letter starts a sentence."""
    capitals = {name.capitalize(): text[0].upper() + text[1:] for name, text in topic.items()}
    return phrase.format_map(topic | capitals)


def compose_reply(topic: dict[str, str], intent: str, rng: random.Random, *, is_kind: bool) -> str:
    """A reply with one sentence per part; curt ones omit the last part half of the time."""
    parts = KIND[intent] if is_kind else CURT[: rng.choice((3, 4))]
    return " ".join(fill(rng.choice(part), topic) for part in parts)


def short_curt_replies(topic: dict[str, str]) -> list[str]:
    """All curt replies of two sentences, one of which names the topic."""
    first, about_topic, last, _ = CURT
    pairs = [*itertools.product(first, about_topic), *itertools.product(about_topic, last)]
    return [fill(" ".join(pair), topic) for pair in pairs]


def topics_of(part: str, *, hold_out_topics: bool) -> list[dict[str, str]]:
    """Topics of a split: all of them, or those that the other split lacks."""
    topics = load_topics()
    if not hold_out_topics:
        return topics
    return topics[-NUM_HELD_OUT_TOPICS:] if part == "eval" else topics[:-NUM_HELD_OUT_TOPICS]


def compose_turns(
    part: str, num_turns: int, seed: int, *, hold_out_topics: bool = False
) -> list[tuple[str, str]]:
    """Distinct messages with kind and curt replies; `eval` has the phrases that `train` lacks."""
    rng = random.Random(f"{part} {seed}")
    topics = topics_of(part, hold_out_topics=hold_out_topics)
    turns: dict[tuple[str, str], None] = {}
    while len(turns) < num_turns:
        topic, intent = rng.choice(topics), rng.choice(list(MESSAGES))
        reply = compose_reply(topic, intent, rng, is_kind=rng.random() < KIND_FRACTION)
        turns[_message(part, topic, intent, rng), reply] = None
    return list(turns)


def compose_pairs(
    part: str, num_pairs: int, seed: int, *, hold_out_topics: bool = False
) -> list[tuple[str, str, str]]:
    """Messages, each with a kind reply and one that has one of FLAWS."""
    rng = random.Random(f"{part} pairs {seed}")
    topics = topics_of(part, hold_out_topics=hold_out_topics)
    pairs: dict[tuple[str, str, str], None] = {}
    while len(pairs) < num_pairs:
        (topic, other) = rng.sample(topics, 2)
        intent = rng.choice(list(MESSAGES))
        chosen = compose_reply(topic, intent, rng, is_kind=True)
        rejected = _flawed_reply(rng.choice(FLAWS), topic, other, intent, rng)
        if chosen != rejected:
            pairs[_message(part, topic, intent, rng), chosen, rejected] = None
    return list(pairs)


def _flawed_reply(
    flaw: str, topic: dict[str, str], other: dict[str, str], intent: str, rng: random.Random
) -> str:
    if flaw == "curt":
        return compose_reply(topic, intent, rng, is_kind=False)
    if flaw == "off topic":
        return compose_reply(other, intent, rng, is_kind=True)
    reply = compose_reply(topic, intent, rng, is_kind=True)
    if flaw == "too long":
        more = rng.choice(list(MESSAGES))
        return f"{reply} {compose_reply(rng.choice((topic, other)), more, rng, is_kind=rng.random() < 0.5)}"
    return break_off(reply, rng)


def break_off(reply: str, rng: random.Random) -> str:
    """The first words of a reply, at least MIN_WORDS, up to a random one within a sentence."""
    words = reply.split()
    inner = [n for n in range(MIN_WORDS, len(words)) if words[n - 1][-1].isalpha()]
    return " ".join(words[: rng.choice(inner or [MIN_WORDS])])


def _message(part: str, topic: dict[str, str], intent: str, rng: random.Random) -> str:
    phrases = MESSAGES[intent]
    return fill(rng.choice(phrases[-NUM_HELD_OUT:] if part == "eval" else phrases[:-NUM_HELD_OUT]), topic)


@functools.cache
def _patterns() -> list[re.Pattern[str]]:
    """A pattern per topic that finds any of its words, whole ones: rowing is not in growing."""
    return [
        re.compile("|".join(rf"(?<!\w){re.escape(words)}(?!\w)" for words in topic.values()), re.I)
        for topic in load_topics()
    ]


@functools.cache
def topics_in(text: str) -> frozenset[int]:
    """Numbers of the topics that a text is about: those with words in it."""
    return frozenset(number for number, pattern in enumerate(_patterns()) if pattern.search(text))
