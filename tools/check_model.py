"""Compares our passes of a saved model with transformers' own: one line per check, with the difference.

    python -m tools.check_model MODEL
    python -m tools.check_model MODEL --dtype bf16 --tp_sizes 2 4

MODEL is a causal LM: a folder or a hub name. Log-probabilities, cached decoding and tensor-parallel slices
are compared with transformers' plain pass over the same weights, one row at a time. Weights are in memory
once; the tensor-parallel ranks start last and load their own. The last line is the verdict; the exit code
is 1 if a check failed.

# N scored tokens
"""

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from common.flags.args import REQUIRED, Problems, begin_tool, flag, parse_args
from common.flags.groups import TokenizerArguments

MAX_DEFAULT_SIZE = 4  # largest tensor-parallel size by default


@dataclass
class CheckModelArguments(TokenizerArguments):
    """The model and the scope of the checks."""

    path: str = flag(REQUIRED, "the model: a folder or a hub name; may come first, without --path")
    dtype: str = flag("fp32", "weights and activations; fp32 shows errors best", choices=("fp32", "bf16"))
    tp_sizes: list[int] = flag(
        [], f"tensor-parallel sizes; empty: all valid ones up to {MAX_DEFAULT_SIZE}, 1: none", low=1
    )
    max_new_tokens: int = flag(16, "maximum tokens of a continuation", low=1)
    plugins: list[str] = flag([], "Python modules to import first, such as your tensor-parallel plan")


if __name__ == "__main__":
    begin_tool(CheckModelArguments, __doc__, leading="path")

import torch
import torch.distributed as dist
from rich.text import Text
from torch import multiprocessing, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from common.data.tokenizer import adds_bos, num_token_ids
from common.flags.plugins import import_plugins
from common.flags.streams import run_tool
from common.generation.decode import SamplingOptions
from common.generation.decode_probe import decode_rows, response_logits
from common.generation.generate import Generator
from common.generation.inference_module import cut_module, share_weights
from common.generation.tp_plans import build_cuts, working_tp_sizes
from common.models.attention import KERNELS, plain_attention, takes_packed
from common.models.family_probe import logprobs_of, own_logprobs, plain_logits
from common.models.loading import DTYPES, ModelOptions, load_causal_lm
from common.models.transformers_internals import attention_of
from common.programs import model_checks, startup
from common.ranks import distributed
from common.ranks.failures import kind_and_line
from tools.terminal import CONSOLE, visible

TEXT = "The harbour woke slowly: two boats had come in with 340 crates of herring. Mind the ice, they called!"
LENGTHS = (5, 23, 2, 41)  # tokens of each row that is scored and continued
# Tolerance relative to the largest number: well above rounding, well below the effect of a wrong formula.
RELATIVE = {torch.float32: 3e-5, torch.bfloat16: 4e-2}
TIE = 1e-3  # the order of additions may swap logits closer than this
LIMIT = timedelta(minutes=20)  # longest wait for another rank
_STATES = {True: ("ok", "bold green"), False: ("FAIL", "bold red"), None: ("note", "yellow")}

Rows = list[list[int]]


class Finding(NamedTuple):
    """One line of the report; a note (`is_ok` None) does not affect the verdict."""

    name: str
    text: str
    is_ok: bool | None = None

    def line(self) -> Text:
        """State, name and result, as a line of the terminal."""
        state, style = _STATES[self.is_ok]
        return Text.assemble((f"{state:<5}", style), visible(f"{self.name:<25}{self.text}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, load the model, print the findings and a verdict."""
    startup.quiet_libraries()
    problems = Problems()
    args = parse_args(
        CheckModelArguments, argv, description=__doc__.splitlines()[0], problems=problems, leading="path"
    )
    tokenizer = check_flags(args, problems)
    startup.print_notes(args, argv)
    findings = []
    for finding in find_all(args, tokenizer, problems):
        CONSOLE.print(finding.line())
        findings.append(finding)
    failed = [finding.name for finding in findings if finding.is_ok is False]
    if failed:
        CONSOLE.print(Text.assemble("\n", ("not ok:", "bold red"), f" {', '.join(failed)}"))
        raise SystemExit(1)
    verdict = (
        f" {sum(finding.is_ok is True for finding in findings)} checks of {args.path}, all within rounding"
    )
    CONSOLE.print(Text.assemble("\n", ("ok:", "bold green"), verdict))


def check_flags(args: CheckModelArguments, problems: Problems) -> PreTrainedTokenizerFast:
    """The tokenizer; exits with all problems if there are any."""
    import_plugins(args.plugins, problems)
    config = model_checks.check_model("--path", args.path, args, problems)
    tokenizer = model_checks.check_tokenizer("--path", args.path, args, problems) if config else None
    if config:
        num_tokens = args.max_new_tokens + max(LENGTHS)
        model_checks.check_length(config, num_tokens, "--max_new_tokens and a prompt", problems)
        model_checks.check_family(f"--path {args.path}", config, args, problems)
    problems.exit_if_any()
    assert tokenizer is not None
    return tokenizer


def find_all(
    args: CheckModelArguments, tokenizer: PreTrainedTokenizerFast, problems: Problems
) -> Iterator[Finding]:
    """Load the model and yield all findings; exits if it cannot be loaded."""
    options = ModelOptions(args.path, args.dtype, 0.0, trust_remote_code=args.trust_remote_code)
    with startup.as_problem(problems):
        model = load_causal_lm(options, num_token_ids(tokenizer)).to(distributed.device()).eval()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{args.path}: {type(model).__name__}, {num_parameters:,} parameters, {args.dtype} on "
        f"{model.device.type}; {len(LENGTHS)} rows of {min(LENGTHS)} to {max(LENGTHS)} tokens"
    )
    rows = build_rows(tokenizer)
    # The generator keeps the attention that the model was loaded with.
    generator = Generator(share_weights(model), num_slots=len(rows) // 2)
    yield from guarded("log-probabilities", check_logprobs(model, rows, num_token_ids(tokenizer)))
    decoded = check_generation(model, generator, rows, tokenizer, args.max_new_tokens)
    yield from guarded("cached decoding", decoded)
    findings, tp_sizes = choose_sizes(model, args.tp_sizes)
    yield from findings
    del model, generator, decoded  # the ranks need the memory
    gc.collect()
    for tp_size in tp_sizes:
        job = RankJob(tp_size, options, num_token_ids(tokenizer), rows, args.plugins)
        yield from guarded(f"tensor parallel {tp_size}", check_ranks(job))


def guarded(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of a check; an exception becomes a failed finding, so the next check still runs."""
    try:
        yield from findings
    except Exception as error:  # the model's own code may raise anything
        yield Finding(name, kind_and_line(error), is_ok=False)


def build_rows(tokenizer: PreTrainedTokenizerFast) -> Rows:
    """Token rows of LENGTHS."""
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    head = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    return [
        head + [ids[(7 * i + k) % len(ids)] for k in range(length - len(head))]
        for i, length in enumerate(LENGTHS)
    ]


# ---- the checks -------------------------------------------------------------------------------------------


def tolerance_of(dtype: torch.dtype, largest: float) -> float:
    """Largest difference between numbers up to `largest` that are computed in different orders."""
    return RELATIVE[dtype] * max(largest, 1.0)


def compare(name: str, own: torch.Tensor, expected: torch.Tensor, tolerance: float, why: str) -> Finding:
    """The finding on two tensors of one shape; NaN in either is a failure. `why`: what depends on them."""
    difference = float((own.double() - expected.double().to(own.device)).abs().max())
    text = f"largest difference {difference:.1e}, at most {tolerance:.1e}  ({why})"
    return Finding(name, text, difference <= tolerance)


def use_torchs_attention(model: PreTrainedModel) -> None:
    """Make the model use torch's attention instead of our kernel."""
    if attention_of(model) in KERNELS:
        model.set_attn_implementation(plain_attention(model))


@torch.inference_mode()
def check_logprobs(model: PreTrainedModel, rows: Rows, num_tokens: int) -> Iterator[Finding]:
    """Yield findings on the log-probabilities of all tokens except each row's first, in padded rows and, if
    possible, in packed ones.
    """
    forms = {"log-probabilities": False} | ({"packed rows": True} if takes_packed(model) else {})
    own = {
        form: own_logprobs(model, rows, is_packed=is_packed, num_valid_tokens=num_tokens)
        for form, is_packed in forms.items()
    }
    use_torchs_attention(model)
    plain = [plain_logits(model, row)[:-1, :num_tokens] for row in rows]
    expected = torch.cat([logprobs_of(logits, row[1:]) for logits, row in zip(plain, rows, strict=True)])
    tolerance = tolerance_of(model.dtype, float(torch.cat(plain).abs().max()))
    for form, numbers in own.items():
        yield compare(form, numbers, expected, tolerance, "PPO's ratios and KL depend on their differences")


@torch.inference_mode()
def check_generation(
    model: PreTrainedModel,
    generator: Generator,
    rows: Rows,
    tokenizer: PreTrainedTokenizerFast,
    max_new_tokens: int,
) -> Iterator[Finding]:
    """Yield whether cached decoding, with fewer slots than prompts, chooses transformers' likeliest tokens,
    with transformers' log-probabilities.
    """
    # Limits differ, so that a waiting prompt starts while other sequences are unfinished.
    limits = torch.tensor([max(max_new_tokens - 2 * (i % 3), 1) for i in range(len(rows))])
    options = SamplingOptions(
        max_new_tokens,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=num_token_ids(tokenizer),
        do_sample=False,
    )
    responses, sampled = decode_rows(generator, rows, options, limits=limits.to(model.device))
    use_torchs_attention(model)
    logits = response_logits(model, rows, responses)[:, : options.num_valid_tokens]
    expected = logprobs_of(logits, torch.cat(responses))
    tolerance = tolerance_of(model.dtype, float(logits.abs().max()))
    yield likeliest_finding(logits.log_softmax(-1).amax(-1) - expected, max(TIE, tolerance))
    why = "PPO's ratio compares the sampler's with the scorer's"
    yield compare("their log-probabilities", torch.cat(sampled), expected, tolerance, why)


def likeliest_finding(gaps: torch.Tensor, tie: float) -> Finding:
    """The finding on greedy texts, whose tokens should be transformers' likeliest; `gaps` (N,): the largest
    logit minus the token's, below `tie` a tie.
    """
    num_right = int((gaps < tie).sum())  # NaN is not a tie
    text = f"{num_right} of {len(gaps)} tokens are transformers' likeliest: their logits are at most"
    text += f" {float(gaps.max()):.1e} lower, less than {tie:.1e} is a tie"
    return Finding("cached decoding", text, num_right == len(gaps))


# ---- tensor parallel, on ranks of this machine: processes on the CPU, one thread each ----------------------


def choose_sizes(model: nn.Module, requested: Sequence[int]) -> tuple[list[Finding], list[int]]:
    """Findings on sizes that do not work, and the sizes to run: by default the smallest that work."""
    wanted = list(requested) or [size for size in working_tp_sizes(model) if size <= MAX_DEFAULT_SIZE]
    findings = []
    for size in wanted if max(wanted) > 1 else [2]:  # if none is wanted, a note if 2 would not work
        try:
            build_cuts(model, size)
        except ValueError as error:  # also for a family without a plan
            is_ok = False if size in wanted else None
            findings.append(Finding(f"tensor parallel {size}", str(error), is_ok))
            wanted = [other for other in wanted if other != size]
    return findings, [size for size in wanted if size > 1]


class RankJob(NamedTuple):
    """Input of the ranks of one size; each rank loads the model as `load_causal_lm` does."""

    tp_size: int
    options: ModelOptions
    num_tokens: int
    rows: Rows
    plugins: list[str]


def check_ranks(job: RankJob) -> Iterator[Finding]:
    """Yield the finding on one size."""
    name = f"tensor parallel {job.tp_size}"
    with tempfile.TemporaryDirectory(prefix="triptych_ranks_") as folder:
        # One fork server does the imports, which take seconds, and then starts the ranks of all sizes.
        multiprocessing.set_forkserver_preload(["tools.check_model"])
        arguments = (job, folder)
        try:  # a failed rank terminates the others
            multiprocessing.start_processes(
                run_rank, arguments, nprocs=job.tp_size, start_method="forkserver"
            )
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]  # last line of a rank's traceback: its exception
            yield Finding(name, f"a rank failed: {last}", is_ok=False)
            return
        own, expected = torch.load(Path(folder, "logits.pt"), weights_only=True)
    tolerance = tolerance_of(DTYPES[job.options.dtype], float(expected.abs().max()))
    yield compare(name, own, expected, tolerance, "so step 3 generates at --inference_tp_size")


def run_rank(rank: int, job: RankJob, folder: str) -> None:
    """Compute with one rank's slices; rank 0 writes the logits of the slices and of the whole model.
    Every rank must call this.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be fewer GPUs than ranks
    torch.set_num_threads(1)
    startup.quiet_libraries()
    import_plugins(job.plugins, Problems())
    store = dist.FileStore(str(Path(folder, "store")), job.tp_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.tp_size, timeout=LIMIT)
    with torch.inference_mode():
        for turn in range(job.tp_size):  # one whole model in memory at a time
            if turn == rank:
                model = load_causal_lm(job.options, job.num_tokens).eval()
                expected = [plain_logits(model, row) for row in job.rows] if rank == 0 else []
                cut_module(model, build_cuts(model, job.tp_size), rank, job.tp_size, None)
                gc.collect()
            dist.barrier()
        own = [plain_logits(model, row) for row in job.rows]
    if rank == 0:
        torch.save((torch.cat(own), torch.cat(expected)), Path(folder, "logits.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_tool(main)
