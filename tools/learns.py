"""Whether a run can learn, and if not, which part is at fault: the checks of `tools.doctor --learns`.

The step's own code takes a few steps on few rows, in one process and without --output_dir. Each check gives a
number beside what it should be; a problem names its cause and the flag that cures it.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
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
from common.programs import single_model, startup, training_loop
from common.programs.startup import Start
from common.ranks import distributed
from common.ranks.failures import StepSkipped, TooManyBadSteps, first_line
from step1_sft.arguments import SFTArguments
from step1_sft.sft_trainer import SFTTrainer
from step2_reward.arguments import RewardArguments
from step2_reward.kto_trainer import KTOTrainer, MismatchedRows
from step2_reward.pair_math import longer_share
from step2_reward.pair_trainer import DPOTrainer, RewardTrainer
from step2_reward.reference import ReferencePairs, compute_reference
from tools.doctor import NOTE, OK, PROBLEM, Line, print_lines
from tools.step_flags import StageArguments, parse_step_args

NUM_READ = 200  # rows whose tokens are read: a share of them is known to 0.07
NUM_FITTED = 4  # rows of the batch that is overfitted
FACTORS = (
    1,
    10,
    100,
)  # of the run's learning rate: a rate for a whole epoch need not fit a batch in few steps
STEPS_PER_FACTOR = 20
# At 0.1 nats per token the likeliest token is the trained one, with 0.9 of the probability; 0.1 of a pair is
# a probability of 0.9 that the chosen response is better.
FITTED_LOSS = 0.1
# Rows that teach no end, as a share: most of the rows, so that the model rather learns to go on.
MAX_ENDLESS = 0.5
# Where the longer response is chosen as often, length alone is as good as reward models are on people's pairs.
MAX_LONGER_CHOSEN = 0.7
# Flags of every checked run: nothing is saved, no schedule, and the first bad step ends it.
CHANGED = (
    *("--output_dir=", "--resume", "auto", "--dry_run", "false", "--trackers", "--max_bad_steps", "0"),
    *("--lr_scheduler_type", "constant", "--num_warmup_steps", "0", "--eval_interval", "0"),
)
# Of steps 1 and 2: the loss of a batch can fall to 0.
CHANGED_SINGLE = (*CHANGED, "--dropout", "0", "--gradient_accumulation_steps", "1")
CHANGED_PAIRS = (*CHANGED_SINGLE, "--label_smoothing", "0", "--center_coef", "0")


def main(argv: Sequence[str] | None = None) -> None:
    """Check a run with these flags and print a line per check; exit with 1 for a problem, 2 for invalid
    flags. `argv` defaults to sys.argv[1:].
    """
    words = sys.argv[1:] if argv is None else list(argv)
    problems = Problems()
    args = parse_step_args(StageArguments, words, problems=problems)
    problems.exit_if_any()
    step_words = without_stage(words)
    screen = sys.stdout
    messages = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(messages):
            num_problems = print_lines(guard(check_step(args, step_words)), screen)
    except SystemExit:  # the step itself refuses the flags
        print(messages.getvalue(), end="", file=sys.stderr)
        raise
    print(f"\n{num_problems} problems" if num_problems else "\nok: this run can learn")
    if num_problems:
        raise SystemExit(1)


def without_stage(words: Sequence[str]) -> list[str]:
    """The arguments without --stage, which the step does not know."""
    kept = [word for word in words if not word.startswith("--stage=")]
    if "--stage" in kept:
        index = kept.index("--stage")
        del kept[index : index + 2]
    return kept


def check_step(args: Any, words: list[str]) -> Iterator[Line]:
    """The checks of the step that `args` has the flags of."""
    if args.stage == 1:
        return check_sft(words)
    if args.stage == 2:
        return check_preferences(words)
    from tools.learns_ppo import check_ppo  # imports step 3

    return check_ppo(args, words)


def guard(lines: Iterator[Line]) -> Iterator[Line]:
    """The lines; an error that ends them is a problem."""
    try:
        yield from lines
    except (StepSkipped, TooManyBadSteps) as error:
        yield PROBLEM, "step", f"cannot be taken: {first_line(error)}"
    except Exception as error:  # of a model, a plugin, a device: later checks need what failed
        yield PROBLEM, "checks", f"ended by {type(error).__name__}: {first_line(error)}"


def spread(count: int, most: int) -> list[int]:
    """At most `most` indexes of `count`, evenly spaced."""
    return [i * count // min(count, most) for i in range(min(count, most))]


# ---- the steps ------------------------------------------------------------------------------------------


def check_sft(words: list[str]) -> Iterator[Line]:
    """Step 1: template, end of turn, one batch, and whether responses of the fitted model end."""
    start, data = single_model.begin(SFTArguments, 1, "", [*words, *CHANGED_SINGLE])
    rows = [data.train[i] for i in spread(len(data.train), NUM_READ)]
    yield check_template(start.template, data)
    learned = [[t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m] for row in rows]
    yield check_ends(learned, start.template, data, f"--max_seq_len {start.args.max_seq_len}")
    by_length = sorted((row for row in rows if any(row["loss_mask"])), key=lambda row: -len(row["input_ids"]))
    contexts = {tuple(row["input_ids"][: response_start(row["loss_mask"])]): row for row in by_length}
    fitted = list(contexts.values())[-NUM_FITTED:]  # short ones of different prompts: the loss can fall to 0
    model = training_loop.load_policy(
        start.args, start.ds_config, num_token_ids(start.tokenizer), dropout=0.0
    )
    trainer = single_model.build_trainer(SFTTrainer, start, model, 1)
    fit = fit_rows(trainer, [collate_sft(fitted)], FITTED_LOSS)
    line = describe_fit(fit, FITTED_LOSS, "--learning_rate", "--loss_on and the masks in tools.check_data")
    yield line
    if line[0] == OK and start.args.zero_stage < 3:  # whose weights are not whole
        yield check_fitted_ends(model.causal_lm, fitted, start)


def check_preferences(words: list[str]) -> Iterator[Line]:
    """Step 2: template, end of turn, length of the chosen responses, one batch."""
    start, data = single_model.begin(RewardArguments, 2, "", [*words, *CHANGED_PAIRS])
    args = start.args
    kind = {"dpo": DPOTrainer, "kto": KTOTrainer, "reward": RewardTrainer}[args.kind]
    yield check_template(start.template, data)
    side = kind.trained_sides[0]
    read = [data.train[i] for i in spread(len(data.train), NUM_READ)]
    responses = [row[f"{side}_ids"][row[f"{side}_response_start"] :] for row in read]
    yield check_ends(responses, start.template, data, f"--max_seq_len {args.max_seq_len}")
    rows: Any = MismatchedRows(data.train, args.max_seq_len) if args.is_unpaired else data.train
    if not args.is_unpaired:
        yield check_lengths(read)
    is_policy = kind is not RewardTrainer
    load = training_loop.load_policy if is_policy else training_loop.load_ranker
    model = load(args, start.ds_config, num_token_ids(start.tokenizer), dropout=0.0)
    trainer = single_model.build_trainer(kind, start, model, 1)
    indexes = spread(len(rows), NUM_FITTED)
    if is_policy:
        rows = ReferencePairs(rows)
        compute_reference(trainer, rows, indexes)
    batch = collate_pairs([rows[i] for i in indexes])
    limit = 0.25 if args.is_unpaired else FITTED_LOSS  # kto: half of the first loss, since its baseline rises
    fit = fit_rows(trainer, [batch], limit)
    yield describe_fit(fit, limit, "--learning_rate", "the pairs in tools.check_data")


# ---- data -----------------------------------------------------------------------------------------------


def check_template(template: Template, data: StageData) -> Line:
    """Whether the prompt of generation starts the training text, and the rest is the response that is trained
    on, up to its end-of-turn token.
    """
    prompt, reply = EXCHANGE
    shown = template.encode(template.segments([prompt], None), 10**6).input_ids
    row = template.encode(template.segments([prompt], reply.content), 10**6)
    response = [t for t, m in zip(row.input_ids, row.response_mask, strict=True) if m]
    text = template.tokenizer.decode(response).strip()
    is_same = row.input_ids[: len(shown)] == shown and row.input_ids[len(shown) :] == response
    num_rows = data.report.num_train + data.report.num_eval
    facts = f"{data.report.num_straddling} of {num_rows} rows have a token across its border (should be 0)"
    if not is_same or text != reply.content + template.eot_token:
        return PROBLEM, "template", f"the response {reply.content!r} is trained as {text!r}; --template"
    state = NOTE if data.report.num_straddling else OK
    return state, "template", f"the prompt of generation starts the training text; {facts}"


def check_ends(
    learned: Sequence[Sequence[int]], template: Template, data: StageData, length_flag: str
) -> Line:
    """Share of rows whose trained tokens include the end-of-turn token."""
    count = sum(template.eot_id in ids for ids in learned)
    text = f"{count} of {len(learned)} rows train {template.eot_token!r} (should be all)"
    if count < (1 - MAX_ENDLESS) * len(learned):
        cure = f"{data.report.num_truncated} rows are truncated to {length_flag}, which must be larger"
        if not data.report.num_truncated:
            cure = "the loss mask leaves it out: --template, --eot_token, --plugins; see docs/data.md"
        return PROBLEM, "end in the loss", f"{text}; {cure}"
    return OK, "end in the loss", text


def check_lengths(rows: Sequence[dict[str, Any]]) -> Line:
    """Accuracy of "the longer response is chosen", which a reward model must exceed."""
    lengths = [len(row["chosen_ids"]) - row["chosen_response_start"] for row in rows]
    others = [len(row["rejected_ids"]) - row["rejected_response_start"] for row in rows]
    longer = torch.tensor(lengths) - torch.tensor(others)
    share = float(longer_share(torch.ones(len(rows)), longer))
    text = f"{share:.2f} of {len(rows)} pairs (should be about 0.5; reward/eval_accuracy must exceed it)"
    if max(share, 1 - share) > MAX_LONGER_CHOSEN:
        return NOTE, "longer is chosen", f"{text}; the run can learn length alone: docs/rewards.md"
    return OK, "longer is chosen", text


# ---- one batch ------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Values of a metric before each step on one batch, and the factor of the learning rate of the last."""

    values: list[float]
    factor: int

    @property
    def has_moved(self) -> bool:
        """Whether any step changed the value."""
        return max(self.values) != min(self.values)


def fit(
    engines: Sequence[Any],
    take_step: Callable[[], float],
    is_fitted: Callable[[list[float]], bool],
    num_steps: int = STEPS_PER_FACTOR,
) -> Fit:
    """Take steps at the run's learning rates, then at ten and a hundred times these, until the values are
    fitted. A rate of 0 stays 0.
    """
    values: list[float] = []
    for factor in FACTORS:
        for _ in range(num_steps):
            values.append(take_step())
            if is_fitted(values):
                return Fit(values, factor)
        for engine in engines:
            raise_rates(engine)
    return Fit(values, factor)


def raise_rates(engine: Any) -> None:
    """Multiply the learning rates of an engine by ten."""
    engine.lr_scheduler.base_lrs = [10 * rate for rate in engine.lr_scheduler.base_lrs]
    for group in engine.optimizer.param_groups:
        group["lr"] *= 10


def fit_rows(trainer: Any, micro_batches: list[PackedBatch], limit: float) -> Fit:
    """Train on the same rows until their loss is below `limit`."""

    def take_step() -> float:
        trainer.train_step(1, micro_batches)
        return trainer.logger.last[f"{trainer.kind}/loss"]

    return fit([trainer.engine], take_step, lambda losses: losses[-1] < limit)


def describe_fit(result: Fit, limit: float, rate_flag: str, cause: str) -> Line:
    """The line of an overfitted batch."""
    name = "overfits one batch"
    first = result.values[0]
    last = result.values[-1]
    text = f"loss {first:.3f} -> {last:.3f} in {len(result.values)} steps (should be below {limit:g})"
    if not result.has_moved:
        return PROBLEM, name, f"{text}; no weight moves: {rate_flag}, --lora_learning_rate or frozen weights"
    if result.factor > 1:
        text += f", at up to {result.factor} times {rate_flag}"
    if last < limit:
        return OK, name, text
    state = NOTE if last < first / 2 else PROBLEM
    return state, name, f"{text}; raise {rate_flag}, or look at {cause}"


def check_fitted_ends(model: Any, rows: Sequence[dict[str, Any]], start: Start) -> Line:
    """Whether greedy responses to the prompts of the fitted rows end, within twice their lengths."""
    starts = [response_start(row["loss_mask"]) for row in rows]
    contexts = [row["input_ids"][:n] for row, n in zip(rows, starts, strict=True)]
    longest = max(len(row["input_ids"]) - n for row, n in zip(rows, starts, strict=True))
    tokenizer = start.tokenizer
    ids, mask = pad_rows(contexts, tokenizer.pad_token_id, on_left=True)
    options = SamplingOptions(
        2 * longest, start.template.eot_id, tokenizer.pad_token_id, num_token_ids(tokenizer), do_sample=False
    )
    device = distributed.device()
    prompts = PromptBatch(ids.to(device), mask.to(device), torch.arange(len(rows)))
    model.eval()
    generator = Generator(share_weights(model), use_cuda_graphs=False)
    count = int(generator.generate(prompts, options).is_finished.sum())
    text = f"{count} of {len(rows)} responses of the fitted model end (should be all)"
    if count < len(rows):
        return PROBLEM, "end is sampled", f"{text}; see the line `end in the loss`, and --eot_token"
    return OK, "end is sampled", text
