"""What a step will train on, before it does: counts, decoded rows with their masks, lengths, padding.

python -m tools.check_data --stage 1 --model_name_or_path MODEL --data_path FILE

The rows are those of the step, made in the same way; those of a lone data set stay in its token cache.
Only the tokenizer is loaded. The last line is the verdict; exit code 1 where the step could not use the data.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import transformers

from common.data.data_options import DataOptions
from common.data.dialogue import Template
from common.data.plugins import import_plugins
from common.data.registry import load_source
from common.data.source_checks import check_sources
from common.data.stage_datasets import StageData, build_pairs, build_prompts, build_sft
from common.flags.args import (
    REQUIRED,
    DataArguments,
    PairArguments,
    Problems,
    TokenizerArguments,
    flag,
    parse_args,
)
from common.flags.flag_values import given_flags, no_effect_notes
from common.programs import startup
from tools.findings import run_tool
from tools.painter import Painter, make_stdout_tolerant
from tools.row_lengths import build_length_columns, length_lines, padding_lines, sequence_lengths
from tools.row_samples import SampleReader

BUILDERS = {1: build_sft, 2: build_pairs, 3: build_prompts}
STEPS = {1: "step 1, SFT", 2: "step 2, reward model", 3: "step 3, PPO"}
LEGENDS = {
    1: (("context", "context"), ("learned", "learned"), ("end of turn", "learned special")),
    2: (("prompt", "context"), ("chosen", "learned"), ("rejected", "rejected")),
    3: (("prompt", "context"), ("special token", "special")),
}


@dataclass
class CheckDataArguments(DataArguments, PairArguments, TokenizerArguments):
    """What is looked at, and how it is shown."""

    stage: int = flag(REQUIRED, "step whose rows are made: 1 SFT, 2 reward model, 3 PPO", choices=(1, 2, 3))
    model_name_or_path: str = flag(
        REQUIRED, "model whose tokenizer is used: a folder or a hub name; its weights are not loaded"
    )
    sft_only_data_path: list[str] = flag([], "data sets that only step 1 uses, whole", only_with="stage=1")
    max_seq_len: int = flag(
        512, "steps 1 and 2: tokens of prompt and response at most", low=4, only_with="stage=1 stage=2"
    )
    max_prompt_seq_len: int = flag(256, "step 3: prompt tokens at most", low=4, only_with="stage=3")
    loss_on: str = flag(
        "response", "step 1: which tokens are learned", choices=("response", "all"), only_with="stage=1"
    )
    seed: int = flag(1234, "seed of the shares of the three steps", low=-(2**32), high=2**32)
    per_device_train_batch_size: int = flag(16, "rows of the batches whose padding is counted", low=1)
    num_samples: int = flag(3, "rows shown of each data set", low=0)
    no_color: bool = flag(False, "brackets in place of colours; also by NO_COLOR, and where no terminal is")
    plugins: list[str] = flag([], "modules to import first: what they register can be named by flags")


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, then make, show and judge the rows of every data set."""
    transformers.logging.set_verbosity_error()
    make_stdout_tolerant()
    argv = sys.argv[1:] if argv is None else list(argv)
    problems = Problems()
    args = parse_args(CheckDataArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    if args.stage == 3 and "eval_fraction" not in given_flags(argv):
        args.eval_fraction = 0.0  # step 3's own default
    template = check_flags(args, problems)
    for note in no_effect_notes(args, argv):
        print(f"note: {note}", file=sys.stderr)
    painter = Painter.for_stream(sys.stdout, no_color=args.no_color)
    wrong, verdict = show_all(args, template, painter)
    if wrong:
        told = "; ".join(text.splitlines()[0].removesuffix(" The first:") for text in wrong)
        print("\n" + painter.paint("not ok:", "bad") + f" {told}")
        raise SystemExit(1)
    print("\n" + painter.paint("ok:", "good") + f" {verdict}")


def show_all(args: CheckDataArguments, template: Template, painter: Painter) -> tuple[list[str], str]:
    """Print what there is to say of every data set; return what is wrong, and how many rows there are."""
    if args.num_samples:
        print(legend(args.stage, painter))
    num_train = num_eval = num_bad = 0
    wrong: list[str] = []
    for options in split_options(args):
        try:
            data = show_source(options, args, template, painter)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
            print(painter.paint(str(error), "bad"))
            continue
        num_train, num_eval = num_train + len(data.train), num_eval + len(data.eval)
        num_bad += data.report.num_bad
    if num_bad > args.max_bad_rows:  # each data set alone had few enough
        wrong.append(f"{num_bad} rows are bad, more than --max_bad_rows {args.max_bad_rows}; mend them")
    return wrong, f"{num_train:,} rows to train, {num_eval:,} held out"


def check_flags(args: CheckDataArguments, problems: Problems) -> Template:
    """Return the template when all flags are right, else leave with all that are not."""
    import_plugins(args.plugins, problems)
    if args.stage:
        for problem in build_options(args).problems():
            problems.add(problem)
    flag, name = "--model_name_or_path", args.model_name_or_path
    tokenizer = startup.check_tokenizer(flag, name, args, problems)
    template, notes = startup.find_template(flag, name, args, tokenizer, problems)
    problems.exit_if_any()
    assert template is not None
    startup.print_note(*notes)
    return template


def build_options(args: CheckDataArguments) -> DataOptions:
    """What decides the rows of the step, as its own program has it: the same key of the token cache."""
    is_sft = args.stage == 1
    options = DataOptions(
        data_path=args.data_path,
        stage=args.stage,
        data_split=args.data_split,
        sft_only_data_path=args.sft_only_data_path if is_sft else [],
        max_seq_len=args.max_seq_len,
        max_prompt_tokens=args.max_prompt_seq_len,
        eval_fraction=args.eval_fraction,
        seed=args.seed,
        max_bad_rows=args.max_bad_rows,
        score_column=args.score_column,
        cache_dir=args.data_output_path,
    )
    if is_sft:
        options = dataclasses.replace(options, loss_on=args.loss_on)
    if args.stage == 2:
        options = dataclasses.replace(options, max_pairs_per_prompt=args.max_pairs_per_prompt)
    return options


def split_options(args: CheckDataArguments) -> list[DataOptions]:
    """The options of each data set alone: its rows do not depend on the others."""
    options = build_options(args)
    return [dataclasses.replace(options, data_path=[p], sft_only_data_path=[]) for p in options.data_path] + [
        dataclasses.replace(options, data_path=[], sft_only_data_path=[p]) for p in options.sft_only_data_path
    ]


def legend(stage: int, painter: Painter) -> str:
    """How the kinds of tokens look."""
    if painter.has_color:
        return "  ".join(painter.paint(text, kind) for text, kind in LEGENDS[stage])
    return {1: "context [[learned]]", 2: "prompt, c [[chosen]], r [[rejected]]", 3: "prompt"}[stage]


def show_source(
    options: DataOptions, args: CheckDataArguments, template: Template, painter: Painter
) -> StageData:
    """Print all there is to say of one data set, and return its rows.

    Raises:
        ValueError: the step could not use it.
    """
    (name,) = options.data_path or options.sft_only_data_path
    told = f"{STEPS[options.stage]}, template {template.name}, at most {options.max_tokens} tokens"
    print("\n" + painter.paint(name, "title") + f"  {told}", flush=True)
    found = check_sources([name], options.stage, options)
    if found:
        raise ValueError("\n".join(found))
    data = BUILDERS[options.stage](options, template.tokenizer, template)
    kind = data.report.kind
    for i, line in enumerate(data.report.lines()):
        line = line.removeprefix(f"{kind} data: ")
        print(line if i == 0 else painter.paint(line, "note"))
    print()
    for line in length_lines(build_length_columns(kind, data.train), painter):
        print(line)
    if options.stage != 3:
        lengths, num_rows = sequence_lengths(kind, data.train), args.per_device_train_batch_size
        print("", *padding_lines(lengths, num_rows, options.max_tokens, options.seed, painter), sep="\n")
    reader = SampleReader(load_source(name, args.score_column), options, template, painter)
    for line in reader.lines(data.train, args.num_samples):
        print(line)
    return data


if __name__ == "__main__":
    run_tool(main)
