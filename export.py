#!/usr/bin/env python
"""Exports any checkpoint, as its run would have exported it at that step.

    python export.py output/ppo/checkpoints/step-000200 --output output/ppo-200
    python export.py output/ppo --output output/ppo-average --what ema     (the newest checkpoint of a run)
    python export.py output/ppo --output output/chat --push_to_hub OWNER/NAME --private
    python export.py OLD --output NEW       (OLD: a model that DeepSpeed-Chat saved)

Runs in one process on the CPU, whatever the run used. The model that the run started from must still be at
the same path; the data are not needed.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.flags.args import REQUIRED, Problems, begin_tool, flag, parse_args, say_loading


@dataclass
class CheckpointExportArguments:
    """Which checkpoint, which of its models, and the output folder."""

    checkpoint: str = flag(
        REQUIRED,
        "checkpoint, or a run's folder for its newest checkpoint; may be given first, without --checkpoint",
    )
    output: str = flag(REQUIRED, "folder to write the export to; must not exist")
    what: str = flag(
        "model",
        "export the model (LoRA merged), only its adapter, or from step 3 the EMA model or the critic",
        choices=("model", "adapter", "ema", "critic"),
    )
    layout: str = flag(
        "transformers",
        "form of the files; deepspeed_chat: its programs load them",
        choices=("transformers", "deepspeed_chat"),
    )
    license: str = flag("", "licence in the model card, such as apache-2.0")
    push_to_hub: str = flag(
        "", "also upload the export to this new repository of the Hugging Face hub: OWNER/NAME"
    )
    private: bool = flag(False, "the repository is private", only_with="push_to_hub")


if __name__ == "__main__":
    begin_tool(CheckpointExportArguments, __doc__, leading="checkpoint")
    say_loading()

import torch
from huggingface_hub import HfApi
from torch import nn

from common.data.tokenizer import load_tokenizer, num_token_ids
from common.models.deepspeed_chat import (
    is_saved_by_it,
    load_base_tokenizer,
    read_model,
    write_weights,
)
from common.models.fingerprint import changed_models, fingerprint
from common.models.loading import plain_model
from common.models.policy_model import language_model
from common.models.value_model import ValueModel
from common.programs import conversation_form, model_checks, running, startup, training_loop
from common.ranks.failures import first_line
from common.runs.checkpoints import Checkpoint, find_checkpoints, newest_intact
from common.runs.export import save_adapter, save_export
from common.runs.resume import program_of
from common.runs.run_files import RUN_FILE
from common.runs.saved_state import TensorReader
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo import main as ppo
from step3_ppo.arguments import PPOArguments

FLAGS = {
    "step1_sft/main.py": SFTArguments,
    "step2_reward/main.py": RewardArguments,
    "step3_ppo/main.py": PPOArguments,
}
ITS_TEMPLATE = "one_line"  # of DeepSpeed-Chat
LAYOUTS = {"transformers": None, "deepspeed_chat": write_weights}


def read_flags(checkpoint: Checkpoint) -> Any:
    """Flags of the run as its program had them, with the precision resolved."""
    saved = checkpoint.meta["args"]
    kind = FLAGS[program_of(saved)]
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{n: v for n, v in saved.items() if n in known} | {"dtype": saved["resolved_dtype"]})


def origins_of(flags: Any, part: str) -> list[str]:
    """Flags of the models that a part of a checkpoint started from; the first has the tokenizer."""
    if not isinstance(flags, PPOArguments):
        return ["--model_name_or_path"]
    return ["--actor_model_name_or_path", *(["--critic_model_name_or_path"] if part == "critic" else [])]


def build_module(args: Any, tokenizer: Any, part: str) -> nn.Module:
    """The module that the run's engine held at the start of training."""
    if isinstance(args, PPOArguments):
        is_critic = part == "critic"
        load = training_loop.load_ranker if is_critic else training_loop.load_policy
        role = args.critic if is_critic else args.actor
        return load(args, {}, num_token_ids(tokenizer), dropout=0.0, role=role)
    if isinstance(args, SFTArguments):
        return training_loop.load_policy(args, {}, num_token_ids(tokenizer), dropout=args.dropout)
    load = training_loop.load_ranker if args.kind == "reward" else training_loop.load_policy
    return load(args, {}, num_token_ids(tokenizer), dropout=args.dropout or 0.0)


@torch.no_grad()
def take_weights(module: nn.Module, checkpoint: Checkpoint, part: str) -> None:
    """Put the trained weights of a checkpoint into a module; frozen weights stay as they were loaded.

    Raises ValueError if one is missing or has another size.
    """
    reader = TensorReader(checkpoint.files(part))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            key = name if part == "ema" else f"{name}:weight"
            if reader.numel(key) != parameter.numel():
                raise ValueError(
                    f"{checkpoint.folder} does not fit the model that its run started from: it holds "
                    f"{reader.numel(key)} elements of {key}, not {parameter.numel()}"
                )
            parameter.copy_(reader.read(key).view(parameter.shape))


def build_metadata(args: Any, what: str, state: dict[str, Any]) -> dict[str, Any]:
    """Contents of triptych.json, as in the run's own export; `state` is the checkpoint's."""
    facts, step = state["progress"]["facts"], state["progress"]["step"]
    if what == "critic":
        return {"step": "critic", "num_steps": step} | conversation_form.describe_form(args)
    if isinstance(args, PPOArguments):
        return ppo.build_metadata(args, step, facts, state["trainer"].get("evaluation", {}))
    kind = "sft" if isinstance(args, SFTArguments) else args.kind
    form = conversation_form.describe_form(args)
    return {"step": kind, "num_steps": step} | form | training_loop.facts_at(step, facts)


def check_output(args: CheckpointExportArguments, run: Path, problems: Problems) -> None:
    """Exit, with all problems so far, unless the output and the repository are new and `run`, the folder of
    the run, has what the model card needs.
    """
    folder = Path(args.output)
    problems.add_if(
        args.license and not (run / RUN_FILE).is_file(),
        f"--license goes into the model card, which needs {run / RUN_FILE}; there is none: leave it out",
    )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problems.add(f"--output {folder} exists; give a new folder")
    problems.add_if(
        args.what == "adapter" and args.layout != "transformers",
        f"--layout {args.layout} has no adapters; use --what model",
    )
    if args.push_to_hub:
        check_repository(args.push_to_hub, problems)
    problems.exit_if_any()


def check(
    args: CheckpointExportArguments, checkpoint: Checkpoint, flags: Any, part: str, problems: Problems
) -> Any:
    """The run's tokenizer, after checks that the checkpoint has the requested model; exits if it does not."""
    if not checkpoint.files(part):
        problems.add(f"--what {args.what}: {checkpoint.folder} has none, because the run had none")
    has_lora = getattr(flags, "lora_dim", 0) or getattr(flags, "actor_lora_dim", 0)
    if args.what == "adapter" and not (has_lora and flags.only_optimize_lora):
        what = f"the run of {checkpoint.folder} had no LoRA, or trained more (--only_optimize_lora false)"
        problems.add(f"--what adapter: {what}; use --what model")
    check_output(args, run_of(checkpoint), problems)
    origins = origins_of(flags, part)
    for flag_name in origins:
        path = getattr(flags, flag_name.removeprefix("--"))
        model_checks.check_model(f"the run's {flag_name}", path, flags, problems, takes_adapter=True)
    problems.exit_if_any()
    origin = f"the run's {origins[0]}"
    path = getattr(flags, origins[0].removeprefix("--"))
    tokenizer = model_checks.check_tokenizer(origin, path, flags, problems)
    conversation_form.find_template(origin, path, flags, tokenizer, problems)  # may set its EOS
    problems.exit_if_any()
    return tokenizer


def check_repository(name: str, problems: Problems) -> None:
    """Add a problem unless the hub can be reached with a token and has no model repository of this name."""
    flag_text = f"--push_to_hub {name}"
    try:
        HfApi().whoami()
        exists = HfApi().repo_exists(name)
    except Exception as error:  # of huggingface_hub, httpx, the operating system
        problems.add(f"{flag_text}: {first_line(error)}; run `hf auth login` or set HF_TOKEN, then try again")
        return
    problems.add_if(exists, f"{flag_text} exists already; give a new name, or upload with `hf upload`")


def run_of(checkpoint: Checkpoint) -> Path:
    """Folder of the run that wrote a checkpoint."""
    return checkpoint.folder.parents[1]


def convert(args: CheckpointExportArguments, problems: Problems) -> None:
    """Export a model that DeepSpeed-Chat saved: an actor, or a reward model or critic as a classifier."""
    folder = Path(args.checkpoint)
    problems.add_if(args.what != "model", f"--what {args.what}: {folder} is a single model; leave it out")
    check_output(args, folder, problems)
    with startup.as_problem(problems):
        load = partial(load_tokenizer, flag="--checkpoint")
        tokenizer = load_base_tokenizer(args.checkpoint, load) or load(args.checkpoint)
        model = read_model(folder)
        model.num_exported_rows = 0  # no more rows than there are tokens
    is_scorer = hasattr(model, "score")
    metadata = {"step": ("sft", "reward")[is_scorer], "template": ITS_TEMPLATE}
    save(args, model, tokenizer, metadata, is_scorer=is_scorer, run=folder)


def save(
    args: CheckpointExportArguments,
    model: Any,
    tokenizer: Any,
    metadata: dict[str, Any],
    *,
    is_scorer: bool,
    run: Path,
) -> None:
    """Write a model or its adapter to --output, and upload it if that is requested."""
    if args.what == "adapter":
        save_adapter(args.output, model, tokenizer, metadata=metadata, run=run)
    else:
        finish = LAYOUTS[args.layout]
        options = {"needs_own_pad": is_scorer, "run": run, "finish": finish}
        save_export(args.output, model, tokenizer, metadata=metadata, **options)
    print(f"saved {args.output}: {args.what} of {args.checkpoint}, {type(plain_model(model)).__name__}")
    if args.push_to_hub:
        upload(args)


def upload(args: CheckpointExportArguments) -> None:
    """Upload the export to a new repository and print its address; exits with a message if that fails."""
    try:
        url = HfApi().create_repo(args.push_to_hub, private=args.private)
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=args.output)
        print(f"uploaded {url}")
    except Exception as error:  # of huggingface_hub, httpx, the operating system
        raise SystemExit(
            f"error: --push_to_hub {args.push_to_hub}: {first_line(error)}; {args.output} is complete: "
            f"`hf upload {args.push_to_hub} {args.output}` uploads it"
        ) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Find the checkpoint, build its model, write the export."""
    problems = Problems()
    args = parse_args(
        CheckpointExportArguments,
        argv,
        description=__doc__.splitlines()[0],
        problems=problems,
        leading="checkpoint",
    )
    problems.exit_if_any()
    if is_saved_by_it(args.checkpoint):
        convert(args, problems)
        return
    checkpoints, damages = find_checkpoints(Path(args.checkpoint))
    checkpoint = newest_intact(checkpoints, damages)
    problems.add_if(checkpoint is None, f"{args.checkpoint}: {'; '.join(damages) or 'it has no checkpoint'}")
    problems.exit_if_any()
    flags = read_flags(checkpoint)
    trained = "actor" if isinstance(flags, PPOArguments) else "model"
    part = args.what if args.what in ("ema", "critic") else trained
    tokenizer = check(args, checkpoint, flags, part, problems)
    state = checkpoint.meta["numbers"]
    before = state["progress"].get("models", {})
    now = {flag: fingerprint(getattr(flags, flag.removeprefix("--"))) for flag in origins_of(flags, part)}
    for problem in changed_models(before, now):
        problems.add(f"{checkpoint.folder}: {problem}")
    problems.exit_if_any()
    with startup.as_problem(problems):
        module = build_module(flags, tokenizer, part)
        take_weights(module, checkpoint, part)
    is_scorer = isinstance(module, ValueModel)
    model = module.classifier if is_scorer else language_model(module)
    metadata = build_metadata(flags, args.what, state)
    if "chat_template_kwargs" not in checkpoint.meta["args"]:  # from a version that scored at the end of turn
        metadata.pop(conversation_form.READS_CLOSING, None)
    if args.license:
        metadata["license"] = args.license
    save(args, model, tokenizer, metadata, is_scorer=is_scorer, run=run_of(checkpoint))


if __name__ == "__main__":
    running.run_program(main)
