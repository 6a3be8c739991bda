#!/usr/bin/env python
"""The whole pipeline: fine-tuning, reward model, PPO, each program with what the ones before it exported.

python train.py --actor-model facebook/opt-1.3b --deployment-type single_node
python train.py --actor-model Qwen/Qwen2.5-0.5B --data_path pairs.jsonl --output-dir output/mine

A step is run by the launch script of its model, or where there is none by training_scripts/run.sh. The same
command resumes where it stopped. Last comes report.html, curves and samples of all steps. Flags may be
written with - or _.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.flags.args import Problems, flag, parse_args
from common.flags.problems import has_hub_form
from common.runs.run_files import REPORT
from tools.until_done import STOPPED, run_group
from training_scripts.launch_table import DEPLOYMENTS, STEPS, find_script

ROOT = Path(__file__).resolve().parent
BAD_INPUT = 2  # as they leave when they have refused what they were given
# DeepSpeed-Chat's words for a model are sizes of OPT.
SIZES = {s: f"facebook/opt-{s}" for s in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")}
RUN = "training_scripts/run.sh"  # for a model without a script of its own


@dataclass
class TrainArguments:
    """The three steps one after the other."""

    actor_model: str = flag("1.3b", "what becomes the chat model: a hub name, a folder, or a size of OPT")
    reward_model: str = flag(
        "",
        "what becomes the reward model and critic; empty: what the actor's script has, else the actor",
    )
    deployment_type: str = flag("single_gpu", "the machines", choices=DEPLOYMENTS)
    step: list[int] = flag([1, 2, 3], "steps to run", low=1, high=3)
    output_dir: str = flag("./output", "folder of everything: step1_sft/, step2_reward/, step3_ppo/")
    actor_zero_stage: str = flag("", "ZeRO stage of the actor; empty: the script's", choices=("", *"0123"))
    reward_zero_stage: str = flag("", "ZeRO stage of the reward model and critic", choices=("", *"0123"))
    num_gpus: int = flag(0, "GPUs of each machine; 0: the script's, or 1 and 8", low=0)
    hostfile: str = flag("hostfile", "multi_node: one line 'hostname slots=8' for each machine")
    data_path: list[str] = flag([], "data sets of all steps; empty: the scripts' own")
    sft_flags: str = flag("", "more flags of step 1: --sft-flags='--lora_dim 8 --packed'")
    reward_flags: str = flag("", "more flags of step 2")
    ppo_flags: str = flag("", "more flags of step 3")
    dry_run: bool = flag(False, "print the commands, run nothing")


class Launch(NamedTuple):
    """How a step is run."""

    words: list[str]
    variables: dict[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.words)])


def step_folder(args: TrainArguments, step: int) -> Path:
    """Return where a step writes."""
    return Path(args.output_dir).absolute() / STEPS[step - 1]


def export_of(args: TrainArguments, step: int) -> Path:
    """Return where a step exports its model to."""
    return step_folder(args, step) / "export"


def check(args: TrainArguments, problems: Problems) -> None:
    """Resolve the models' names; add what is wrong."""
    args.actor_model = SIZES.get(args.actor_model.lower(), args.actor_model)
    if not args.reward_model:
        script = find_script(3, args.deployment_type, args.actor_model)
        is_opt = args.actor_model in SIZES.values()
        args.reward_model = SIZES["350m"] if script and is_opt else args.actor_model  # the script's critic
    args.reward_model = SIZES.get(args.reward_model.lower(), args.reward_model)
    for name in ("actor_model", "reward_model"):
        model = getattr(args, name)
        if Path(model).is_dir():
            setattr(args, name, str(Path(model).absolute()))
        elif not has_hub_form(model):
            problems.add(f"--{name} {model}: no such folder; give a hub name, a folder, or a size of OPT")
    args.step = sorted(set(args.step))
    problems.check(bool(args.step), "--step without a number: the steps are 1, 2 and 3")
    if 3 in args.step:
        for step in (1, 2):
            if step not in args.step and not (export_of(args, step) / "config.json").exists():
                problems.add(f"--step 3 needs {export_of(args, step)}, which step {step} writes; add {step}")
    if args.deployment_type == "multi_node" and not Path(args.hostfile).is_file():
        problems.add(f"--hostfile {args.hostfile}: no such file; one line 'hostname slots=8' a machine")
    for name in ("sft_flags", "reward_flags", "ppo_flags"):
        try:
            shlex.split(getattr(args, name))
        except ValueError as error:
            problems.add(f"--{name} {getattr(args, name)}: {error}")
    if not problems.messages:
        check_vocabularies(args, problems)
    args.data_path = [str(Path(d).absolute()) if Path(d).exists() else d for d in args.data_path]
    problems.exit_if_any()


def check_vocabularies(args: TrainArguments, problems: Problems) -> None:
    """Add a problem when step 3 would refuse the two models after steps 1 and 2 have trained them.

    Those that cannot be loaded here are left to the steps, which say why.
    """
    pair = (args.actor_model, args.reward_model)
    if 3 not in args.step or pair[0] == pair[1] or set(pair) <= set(SIZES.values()):
        return
    from transformers import AutoTokenizer  # slow to import, rarely needed

    from common.data.tokenizer import vocabulary_difference

    try:
        difference = vocabulary_difference(*(AutoTokenizer.from_pretrained(name) for name in pair))
    except Exception:  # OSError, ValueError, KeyError ... by what is missing
        return
    if difference:
        problems.add(
            f"--reward_model {pair[1]} has another vocabulary than --actor_model {pair[0]} ({difference}), "
            "and step 3 gives the same token ids to both; give one of the actor's family, or leave it out"
        )


def build_launch(args: TrainArguments, step: int) -> Launch:
    """Return how a step is run: by its model's script, or by run.sh, which has settings for all."""
    actor, reward = args.actor_model, args.reward_model
    model = {1: actor, 2: reward, 3: actor}[step]
    script = find_script(step, args.deployment_type, model)
    words = [RUN, {1: "sft", 2: "reward", 3: "ppo"}[step], model, args.deployment_type]
    if script:
        words = [str(script.relative_to(ROOT))]
    variables = {"OUTPUT_DIR": str(step_folder(args, step))}
    if args.num_gpus:
        variables["NUM_GPUS"] = str(args.num_gpus)
    if args.deployment_type == "multi_node":
        variables["HOSTFILE"] = str(Path(args.hostfile).absolute())
    if step == 3:
        variables |= {"ACTOR_MODEL": str(export_of(args, 1)), "CRITIC_MODEL": str(export_of(args, 2))}
    # The user's flags stand last, and win.
    words += ["--data_path", *args.data_path] if args.data_path else []
    actor_flag, reward_flag = {3: ("--actor_zero_stage", "--critic_zero_stage")}.get(
        step, ("--zero_stage",) * 2
    )
    if args.actor_zero_stage and step != 2:
        words += [actor_flag, args.actor_zero_stage]
    if args.reward_zero_stage and step != 1:
        words += [reward_flag, args.reward_zero_stage]
    words += shlex.split({1: args.sft_flags, 2: args.reward_flags, 3: args.ppo_flags}[step])
    return Launch(["bash", *words], variables)


def run_launch(launch: Launch) -> int:
    """Return the exit code of a step, STOPPED after a signal."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    code, was_asked = run_group(launch.words, cwd=ROOT, env=os.environ | {"PATH": path} | launch.variables)
    return STOPPED if was_asked and code else code


def report(args: TrainArguments) -> None:
    """Print where the exports of the steps are, and write one report on all of them."""
    from tools.report.page import write_report  # matplotlib is slow to import

    exports = [export_of(args, step) for step in (1, 2, 3) if export_of(args, step).exists()]
    page = Path(args.output_dir).absolute() / REPORT
    print("\n" + "\n".join(f"export: {export}" for export in exports))
    try:
        write_report([export.parent for export in exports], page)
        print(f"curves, samples, configuration: {page}")
    except OSError as error:
        print(f"note: {page} cannot be written: {error.strerror}", file=sys.stderr)
    if 3 in args.step:
        print(f"talk to it: python chat.py {export_of(args, 3)}")


def main() -> None:
    """Check, run the steps that are asked for, report."""
    problems = Problems()
    words = [_with_underscores(word) for word in sys.argv[1:]]
    args = parse_args(TrainArguments, words, description=__doc__.splitlines()[0], problems=problems)
    check(args, problems)
    for step in args.step:
        launch = build_launch(args, step)
        print(f"---- step {step}: {launch}", flush=True)
        code = 0 if args.dry_run else run_launch(launch)
        if code:
            how = "was stopped" if code == STOPPED else f"ended with exit code {code}"
            log = step_folder(args, step) / "train.log"
            then = "mend what its message names, then give" if code == BAD_INPUT else "resume it by"
            print(f"step {step} {how}; its output is in {log}; {then} the same command", file=sys.stderr)
            raise SystemExit(code)
    if not args.dry_run:
        report(args)


def _with_underscores(word: str) -> str:
    """Return a flag's name as ours are written: DeepSpeed-Chat's program of this name has dashes."""
    found = re.fullmatch(r"--([\w-]+)(=.*)?", word, re.DOTALL)
    return f"--{found[1].replace('-', '_')}{found[2] or ''}" if found else word


if __name__ == "__main__":
    main()
