"""`python -m common.check data|model|plan FLAGS`: hands the flags to the check of that name."""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

CHECKS = {
    "data": "the rows of a step: counts, samples with their masks, lengths, padding",
    "model": "a saved model: whether our scores, texts and slices are what transformers computes",
    "plan": "a run: its steps, batches and memory, before it is started",
}
USAGE = "usage: python -m common.check NAME FLAGS     (NAME --help lists the flags)\n\n" + "\n".join(
    f"  {name:<6} {what}" for name, what in CHECKS.items()
)


def main(argv: Sequence[str]) -> None:
    """Run the check that the first word names; exit code 2 when there is none of that name."""
    name, *flags = argv or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        return
    module = f"common.check.check_{name}"
    if name not in CHECKS:
        near = difflib.get_close_matches(name, CHECKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: there is no check called {name!r}{hint}\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    if importlib.util.find_spec(module) is None:
        print(f"error: this version has no check of the {name} yet\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv[0] = f"python -m common.check {name}"  # what --help calls the program
    importlib.import_module(module).main(flags)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
