"""Whether a run can learn, and if not, which part is at fault: the checks of `tools.doctor --learns`.

The step's own code takes a few steps on few rows, in one process and without --output_dir. Each check gives a
number beside what it should be; a problem names its cause and the flag that cures it.
"""

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from common.data.collators import collate_pairs, collate_sft
from common.data.dialogue import EXCHANGE, Template, response_start
from common.data.packed_batch import PackedBatch, pad_rows
from common.data.stage_datasets import StageData
from common.data.tokenizer import num_token_ids
from common.flags.args import Problems
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.programs import single_model, training_loop
from common.ranks import distributed
from step1_sft.arguments import SFTArguments
from step1_sft.sft_trainer import SFTTrainer
from step2_reward.arguments import RewardArguments
from step2_reward.kto_trainer import KTOTrainer, MismatchedRows
from step2_reward.pair_math import longer_share
from step2_reward.pair_trainer import DPOTrainer, RewardTrainer
from step2_reward.reference import ReferencePairs, compute_reference
from tools.doctor import Line, judged
from tools.doctor import main as print_lines
from tools.step_flags import StageArguments, parse_step_args

NUM_READ = 200  # rows whose tokens are read: a share of them is known to 0.07
NUM_FITTED = 4  # rows of the batch that is overfitted
# Factors of the run's learning rate, which may be too low for a few steps, and their shares of the time
FACTORS = {1: 0.25, 10: 0.25, 100: 0.5}
STEPS_PER_FACTOR = 20
LIMIT_SECONDS = 60.0  # of the steps of a check
# At 0.1 nats per token the trained token has 0.9 of the probability, so greedy decoding repeats it; at 0.1
# per pair, the chosen response has 0.9 of the probability of being the better one.
FITTED_LOSS = 0.1
FITTED_LOSS_KTO = 0.25  # half of the first loss: the baseline rises with the rewards
MIN_ENDING = 0.5  # share of rows that train the end of turn; below, most teach to go on
# Share of pairs whose longer response is chosen: beyond, length alone is as accurate as reward models are.
MAX_LONGER = 0.7
# Flags of every checked run: nothing is saved, no schedule, and the first bad step ends it.
CHANGED = (
    *("--output_dir=", "--resume", "auto", "--dry_run", "false", "--trackers", "--max_bad_steps", "0"),
    *("--lr_scheduler_type", "constant", "--num_warmup_steps", "0", "--eval_interval", "0"),
)
CHANGED_SINGLE = (*CHANGED, "--dropout", "0", "--gradient_accumulation_steps", "1")
CHANGED_PAIRS = (*CHANGED_SINGLE, "--label_smoothing", "0", "--center_coef", "0")  # the loss can fall to 0


def check_run(argv: Sequence[str] | None = None) -> None:
    """Check a run with these flags and print a line per check; exit with 1 for a problem, 2 for invalid
    flags. `argv` defaults to sys.argv[1:].
    """
    words = sys.argv[1:] if argv is None else list(argv)
    problems = Problems()
    args = parse_step_args(StageArguments, words, problems=problems)
    problems.exit_if_any()
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--stage")  # which the step does not know
    words = finder.parse_known_args(words)[1]

    def check_step() -> Iterator[Line]:
        if args.stage < 3:
            return {1: check_sft, 2: check_preferences}[args.stage](words)
        from tools.learns_ppo import check_ppo  # imports step 3

        return check_ppo(args, words)

    screen = sys.stdout
    messages = io.StringIO()  # of the step, which does not know that it is checked
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(messages):
            code = print_lines([check_step], "this run can learn", screen)
    except SystemExit:  # the step refuses the flags
        print(messages.getvalue(), end="", file=sys.stderr)
        raise
    if code:
        raise SystemExit(code)


def spread(count: int) -> list[int]:
    """At most NUM_READ indexes of `count`, evenly spaced."""
    return [i * count // min(count, NUM_READ) for i in range(min(count, NUM_READ))]


def context_of(row: dict[str, Any]) -> list[int]:
    """Token ids of an SFT row before its last response; the template may close that with unlearned tokens."""
    mask = row["loss_mask"]
    end = len(mask) - mask[::-1].index(True)
    return row["input_ids"][: response_start(mask[:end])]


# ---- the steps ------------------------------------------------------------------------------------------


def check_sft(words: list[str]) -> Iterator[Line]:
    """Step 1: template, end of turn, one batch, and whether responses of the fitted model end."""
    start, data = single_model.begin(SFTArguments, 1, "", [*words, *CHANGED_SINGLE])
    args = start.args
    yield check_template(start.template, data)
    rows = [data.train[i] for i in spread(len(data.train))]
    learned = [[t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m] for row in rows]
    yield check_ends(learned, start.template, data, args)
    rows = sorted((row for row in rows if any(row["loss_mask"])), key=lambda row: -len(row["input_ids"]))
    by_context = {tuple(context_of(row)): row for row in rows}
    # Short rows of different prompts: their loss can fall to 0.
    rows = list(by_context.values())[-NUM_FITTED:]
    model = training_loop.load_policy(args, start.ds_config, num_token_ids(start.tokenizer), dropout=0.0)
    trainer = single_model.build_trainer(SFTTrainer, start, model, 1)
    yield fit_rows(trainer, collate_sft(rows), FITTED_LOSS)
    if args.zero_stage < 3 and trainer.logger.last["sft/loss"] < FITTED_LOSS:  # 3 has no whole weights
        yield check_fitted_ends(model.causal_lm, rows, start.template)


def check_preferences(words: list[str]) -> Iterator[Line]:
    """Step 2: template, end of turn, length of the chosen responses, one batch."""
    start, data = single_model.begin(RewardArguments, 2, "", [*words, *CHANGED_PAIRS])
    args = start.args
    kind = {"dpo": DPOTrainer, "kto": KTOTrainer, "reward": RewardTrainer}[args.kind]
    yield check_template(start.template, data)
    side = kind.trained_sides[0]
    read = [data.train[i] for i in spread(len(data.train))]
    responses = [row[f"{side}_ids"][row[f"{side}_response_start"] :] for row in read]
    yield check_ends(responses, start.template, data, args)
    rows: Any = MismatchedRows(data.train, args.max_seq_len) if args.is_unpaired else data.train
    if not args.is_unpaired:
        yield check_lengths(read)
    load = training_loop.load_ranker if args.is_scored else training_loop.load_policy
    model = load(args, start.ds_config, num_token_ids(start.tokenizer), dropout=0.0)
    trainer = single_model.build_trainer(kind, start, model, 1)
    lengths = rows.lengths(f"{side}_ids")
    indexes = sorted(spread(len(rows)), key=lambda index: lengths[index])[:NUM_FITTED]  # short ones are fast
    if not args.is_scored:
        rows = ReferencePairs(rows)
        compute_reference(trainer, rows, indexes)
    batch = collate_pairs([rows[i] for i in indexes])
    yield fit_rows(trainer, batch, FITTED_LOSS_KTO if args.is_unpaired else FITTED_LOSS)


# ---- data -----------------------------------------------------------------------------------------------


def check_template(template: Template, data: StageData) -> Line:
    """Whether the prompt of generation starts the training text, and the rest is the response that is trained
    on, up to its end-of-turn token.
    """
    prompt, reply = EXCHANGE
    shown = template.encode(template.segments([prompt], None), 10**6).input_ids
    row = template.encode(template.segments([prompt], reply.content), 10**6)
    response = [t for t, m in zip(row.input_ids, row.response_mask, strict=True) if m]
    texts = [reply.content + template.eot_token, template.tokenizer.decode(response).strip()]
    text = (
        f"the prompt of generation and {texts[1]!r} (should be {texts[0]!r}) make the trained text; "
        f"{data.report.num_straddling} rows have a token across their border (should be 0)"
    )
    is_same = row.input_ids == shown + response and texts[0] == texts[1]
    is_ok = is_same and not data.report.num_straddling
    return judged("template", text, "--template, --eot_token; docs/data.md", is_ok=is_ok, is_note=is_same)


def check_ends(learned: Sequence[Sequence[int]], template: Template, data: StageData, args: Any) -> Line:
    """Share of rows whose trained tokens include the end-of-turn token."""
    count = sum(template.eot_id in ids for ids in learned)
    text = f"{count} of {len(learned)} rows train {template.eot_token!r} (should be all)"
    cure = f"raise --max_seq_len {args.max_seq_len}: {data.report.num_truncated} rows are cut"
    if not data.report.num_truncated:
        cure = "the loss mask leaves it out: --eot_token, --template, --plugins; docs/data.md"
    return judged("end in the loss", text, cure, is_ok=count >= MIN_ENDING * len(learned))


def check_lengths(rows: Sequence[dict[str, Any]]) -> Line:
    """Accuracy of "the longer response is chosen", which a reward model must exceed."""
    ends = [
        [len(row[f"{side}_ids"]) - row[f"{side}_response_start"] for row in rows]
        for side in ("chosen", "rejected")
    ]
    share = float(longer_share(torch.ones(len(rows)), torch.tensor(ends[0]) - torch.tensor(ends[1])))
    text = f"in {share:.2f} of {len(rows)} pairs (should be near 0.5; reward/eval_accuracy must exceed it)"
    cure = "the run can learn length alone; docs/rewards.md"
    is_ok = max(share, 1 - share) <= MAX_LONGER
    return judged("longer is chosen", text, cure, is_ok=is_ok, is_note=True)


# ---- one batch ------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Values of the steps of `fit`, and how far it got."""

    values: list[float]
    factor: int  # of the learning rates in the last step
    is_fitted: bool
    is_late: bool  # fewer steps than there should be

    def judge(
        self, name: str, text: str, cure: str, *, role: str = "", has_moved: bool, is_note: bool = False
    ) -> Line:
        """The line of a check: a note if there was no time for all steps; `role` begins the flags."""
        if not has_moved:
            cure = f"no weight moves: --{role}learning_rate, --{role}lora_learning_rate, frozen weights"
        elif self.is_late:
            cure = "undecided, as its time was over: use a faster machine, or a smaller model; " + cure
        text = f"{text} after {len(self.values)} updates at up to {self.factor} times the learning rates"
        is_note = has_moved and (is_note or self.is_late)
        return judged(name, text, cure, is_ok=self.is_fitted and has_moved, is_note=is_note)


def within(seconds: float, items: Iterable[Any]) -> Iterator[Any]:
    """Yield items, at least one, until the time is over."""
    end = time.monotonic() + seconds
    for item in items:
        yield item
        if time.monotonic() > end:
            return


def fit(
    engines: Sequence[Any],
    take_step: Callable[[], float],
    is_fitted: Callable[[float], bool],
    num_steps: int = STEPS_PER_FACTOR,
    seconds: float = LIMIT_SECONDS,
) -> Fit:
    """Take steps at the run's learning rates, then at ten and a hundred times these, until a step's value is
    fitted. A rate of 0 stays 0.
    """
    values: list[float] = []
    for factor, share in FACTORS.items():
        for engine in engines if factor > 1 else ():
            engine.lr_scheduler.base_lrs = [10 * rate for rate in engine.lr_scheduler.base_lrs]
            for group in engine.optimizer.param_groups:
                group["lr"] *= 10
        for _ in within(seconds * share, range(num_steps)):
            values.append(take_step())
            if is_fitted(values[-1]):
                return Fit(values, factor, is_fitted=True, is_late=False)
    return Fit(values, factor, is_fitted=False, is_late=len(values) < num_steps * len(FACTORS))


def fit_rows(trainer: Any, batch: PackedBatch, limit: float) -> Line:
    """Whether the loss falls below `limit` by training on the same rows."""

    def take_step() -> float:
        trainer.train_step(1, [batch])
        return trainer.logger.last[f"{trainer.kind}/loss"]

    done = fit([trainer.engine], take_step, lambda loss: loss < limit)
    text = f"loss {done.values[0]:.3f} -> {done.values[-1]:.3f} (should be below {limit:g})"
    cure = "raise --learning_rate, or look at the learned tokens with tools.check_data"
    has_moved = len(set(done.values)) > 1 or done.is_fitted
    return done.judge(
        "overfits one batch", text, cure, has_moved=has_moved, is_note=done.values[-1] < done.values[0] / 2
    )


def check_fitted_ends(model: Any, rows: Sequence[dict[str, Any]], template: Template) -> Line:
    """Whether greedy responses to the prompts of the fitted rows end, within twice the longest row."""
    pad_id = template.tokenizer.pad_token_id
    contexts = [context_of(row) for row in rows]
    ids, mask = (x.to(distributed.device()) for x in pad_rows(contexts, pad_id, on_left=True))
    most = 2 * max(len(row["input_ids"]) for row in rows)
    options = SamplingOptions(most, template.eot_id, pad_id, do_sample=False)
    generator = Generator(share_weights(model), use_cuda_graphs=False)
    generation = generator.generate(PromptBatch(ids, mask, torch.arange(len(rows))), options)
    count = int(generation.is_finished.sum())
    text = f"{count} of {len(rows)} responses of the fitted model end (should be all)"
    return judged("end is sampled", text, "see `end in the loss`; --eot_token", is_ok=count == len(rows))
