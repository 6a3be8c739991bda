"""A pretended GPU in every Python process with this folder on its PYTHONPATH that names torch or a file."""

import sys

if any(word in " ".join(sys.orig_argv) for word in ("torch", ".py", "pytest", "spawn_main", "tools.")):
    from contextlib import ExitStack
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.insert(1, str(Path(__file__).parents[2]))
    from pretended_gpu import pretended_gpu

    stack = ExitStack()  # for the whole process
    stack.enter_context(pretended_gpu())
