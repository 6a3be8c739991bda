"""The words of a command line before its first flag: `chat.py PATH`, `arena.py SFT PPO`. No torch in here."""


def split_leading_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return (words before the first flag, all that follows)."""
    first_flag = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    return argv[:first_flag], argv[first_flag:]
