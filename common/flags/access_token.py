"""The access token that a server shares with its clients. Does not import torch.

It comes from a file or the environment, never from a command line, which any user of the machine can
read, and no message holds it.
"""

import os
from pathlib import Path

from common.flags.problems import Problems

SERVER_VARIABLE = "TRIPTYCH_TOKEN"
CLIENT_VARIABLE = "TRIPTYCH_REWARD_TOKEN"  # takes precedence; for a server with another token
JUDGE_VARIABLE = "TRIPTYCH_JUDGE_TOKEN"  # separate: a judge may be an external service


def server_token(token_file: str, problems: Problems) -> str:
    """The token that requests must carry, from --token_file or TRIPTYCH_TOKEN; "" if none is required. Adds a
    problem if the file cannot be read or the token is not valid in a header.
    """
    origin = SERVER_VARIABLE
    text = os.environ.get(SERVER_VARIABLE, "")
    try:
        if token_file:
            origin = f"--token_file {token_file}"
            text = Path(token_file).read_text(errors="replace").strip()
            problems.add_if(not text, f"{origin} is empty; write a token on one line into it")
        return _checked(origin, text)
    except OSError as error:
        problems.add(f"{origin} cannot be read: {error}")
    except ValueError as error:
        problems.add(str(error))
    return ""


def client_token() -> str:
    """The token for requests to a reward server, from TRIPTYCH_REWARD_TOKEN or TRIPTYCH_TOKEN.

    Raises ValueError if it is not valid in a header.
    """
    name = CLIENT_VARIABLE if os.environ.get(CLIENT_VARIABLE) else SERVER_VARIABLE
    return _checked(name, os.environ.get(name, ""))


def judge_token() -> str:
    """The token for requests to a judge, from TRIPTYCH_JUDGE_TOKEN only.

    Raises ValueError if it is not valid in a header.
    """
    return _checked(JUDGE_VARIABLE, os.environ.get(JUDGE_VARIABLE, ""))


def _checked(origin: str, token: str) -> str:
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            f"{origin} holds {len(token)} characters that are not a valid token: use ASCII letters, digits "
            "and punctuation on one line, without spaces"
        )
    return token
