"""What may be wrong around a program before it starts: a launcher's variables. No torch in here."""

import os

from common.flags.problems import Problems

OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT")
NEEDED_WITH_RANK = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START = "start by deepspeed or torchrun, which set all of them, or unset them for one process"


def check_environment(problems: Problems) -> bool:
    """Return whether all is right after adding what is not: a launcher's variables, OMP_NUM_THREADS."""
    before = len(problems.messages)
    values = {name: os.environ[name] for name in OF_A_LAUNCHER if name in os.environ}
    for name, text in values.items():
        problems.check(_is_whole(text), f"{name}={text} in the environment is no whole number; {START}")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    problems.check(
        all(_is_whole(part) and int(part) > 0 for part in threads.split(",")),
        f"OMP_NUM_THREADS={threads} in the environment is no number of threads; set it to 1, or unset it",
    )
    if len(problems.messages) == before:
        _check_ranks({name: int(text) for name, text in values.items()}, problems)
    return len(problems.messages) == before


def _check_ranks(values: dict[str, int], problems: Problems) -> None:
    size = values.get("WORLD_SIZE", 1)
    if "RANK" not in values:
        problems.check(size == 1, f"WORLD_SIZE={size} is in the environment and RANK is not; {START}")
        return
    missing = [name for name in NEEDED_WITH_RANK if not os.environ.get(name)]
    if missing:
        problems.add(f"RANK is in the environment and {', '.join(missing)} not; {START}")
        return
    rank, port = values["RANK"], values["MASTER_PORT"]
    problems.check(rank < size, f"RANK={rank} is not below WORLD_SIZE={size}: ranks count from 0; {START}")
    problems.check(0 < port < 2**16, f"MASTER_PORT={port} is no port; use one from 1024 to 65535")


def _is_whole(text: str) -> bool:
    return text.strip().isascii() and text.strip().isdigit()
