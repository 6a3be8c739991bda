"""`python -m tools.doctor`: a line for each thing that a run needs: ok, a note, or a problem with its cure.

The exit code is 0 without problems, 1 with some. --json adds all of it as JSON, in the last line.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.flags.args import Problems, flag, parse_args
from tools.doctor import accelerator, machine, network, packages, self_test
from tools.findings import Finding, guarded, paint, run_tool, use_color

STATES = {True: "ok", False: "problem", None: "note"}


@dataclass
class DoctorArguments:
    """What is looked at, and how it is told."""

    output_dir: str = flag(".", "where runs are going to write: the room there is looked at")
    self_test_seconds: float = flag(
        10.0, "seconds for a step of training and a text, imports aside; 0: none", low=0
    )
    import_seconds: float = flag(300.0, "seconds that the imports of the self-test may take", above=0)
    hub_seconds: float = flag(3.0, "seconds that the model hub may take to answer; 0: it is not asked", low=0)
    json: bool = flag(False, "print everything as JSON too, in the last line")
    no_color: bool = flag(False, "no colours; also by NO_COLOR, and where no terminal is")


def find_all(args: DoctorArguments) -> Iterator[Finding]:
    """Yield the findings, one check after the other; what one raises is its finding."""
    yield from guarded("requirements", packages.check_requirements)
    imported: dict[str, bool] = {}
    for name in packages.IMPORTED:
        for finding in guarded(f"import {name}", packages.check_import, name):
            imported[name] = finding.is_ok is True
            yield finding
    yield from guarded("trackers", packages.check_trackers)
    yield from guarded("environment", machine.check_environment_variables)
    yield from guarded("GPUs", accelerator.check_gpus, imported["torch"])
    yield from guarded("flash-attn", accelerator.check_flash_attention, imported["torch"])
    yield from guarded("DeepSpeed kernels", accelerator.check_kernels, imported["deepspeed"])
    yield from guarded("build locks", machine.check_build_locks)
    yield from guarded("memory", machine.check_memory)
    yield from guarded("disk", machine.check_disk, args.output_dir)
    yield from guarded("launchers", network.check_launchers)
    yield from guarded("ports", network.check_ports)
    yield from guarded("model hub", network.check_hub, args.hub_seconds)
    missing = [name for name in packages.IMPORTED if not imported[name]]
    yield from guarded("self-test", self_test.check, args.self_test_seconds, args.import_seconds, missing)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what is found and a verdict; exit code 1 when there is a problem."""
    problems = Problems()
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse_args(DoctorArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    problems.exit_if_any()
    has_color = use_color(args.no_color)
    findings = []
    for finding in find_all(args):
        print(finding.line(has_color, bad_word=STATES[False]), flush=True)
        findings.append(finding)
    bad = [finding.name for finding in findings if finding.is_ok is False]
    if bad:
        counted = f"{len(bad)} problem{'s' * (len(bad) > 1)}:"
        print("\n" + paint(counted, "bad", has_color) + f" {', '.join(bad)}")
    else:
        print("\n" + paint("ok:", "good", has_color) + " this machine can run the programs")
    if args.json:
        told = [dataclasses.asdict(f) | {"is_ok": STATES[f.is_ok]} for f in findings]
        rows = [{"state": row.pop("is_ok"), **row} for row in told]
        print(json.dumps({"ok": not bad, "findings": rows}))
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    run_tool(main)
