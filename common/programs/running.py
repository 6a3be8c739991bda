"""Running a program: signals, failures, exit codes."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from common.flags.streams import exit_at_ctrl_c, harden_streams, keep_imports
from common.programs.startup import keep_freed_memory, quiet_libraries
from common.ranks import distributed, passes, watchdog
from common.ranks.failures import StepSkipped, TooManyBadSteps, say
from common.runs import run_files
from common.runs.durable_files import SaveFailed
from common.runs.run import Stopped
from common.runs.run_files import STOPPED


def _exit_at_once(*_: Any) -> None:
    """End the process; a KeyboardInterrupt would be lost inside a destructor or a C++ callback.

    Waits for nothing: other threads and ranks may be inside a collective.
    """
    say("stopped by Ctrl-C")
    run_files.release_lock(130)
    os._exit(130)


def run_program(program: Callable[[], Any], *, shows_progress: bool = True) -> None:
    """Run a program's main function. A chat or a server does not show the progress of its passes.

    Ctrl-C, a skipped step, an out-of-memory error and another rank's failure end it with one line and no
    traceback.
    """
    harden_streams()
    keep_imports()
    quiet_libraries()
    keep_freed_memory()
    exit_at_ctrl_c(_exit_at_once)
    code, cause = 0, None
    try:
        with contextlib.ExitStack() as stack:
            if shows_progress:
                watchdog.print_progress_lines()
                stack.enter_context(passes.BAR)
            program()
    except Stopped as stopped:
        if distributed.is_main():
            say(str(stopped))
        code = STOPPED
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        cause = left.__context__  # the error reported as a problem
        raise
    except (SaveFailed, StepSkipped, TooManyBadSteps) as error:  # raised on all ranks
        if distributed.is_main():
            say(f"error: {error}")
        watchdog.shut_down(3, error)
        run_files.release_lock(3)
        os._exit(3)
    except Exception as error:
        watchdog.exit_on_error(error)
        code = 1
        raise
    finally:
        distributed.stop(code, cause)
        run_files.release_lock(code)
    if code:
        raise SystemExit(code)
