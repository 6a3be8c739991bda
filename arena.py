#!/usr/bin/env python
"""People compare models blindly on a page; programs ask them by OpenAI's protocol.

python arena.py output/sft/export output/ppo/export
python arena.py sft=output/sft/export ppo=output/ppo/export --data_path prompts.jsonl
python arena.py export preferences.jsonl
"""

import sys

from common.programs import startup
from serving.arena_programs import export, serve


def main() -> None:
    """Serve, or export what was judged."""
    if sys.argv[1:2] == ["export"]:
        export(sys.argv[2:])
    else:
        serve(sys.argv[1:])


if __name__ == "__main__":
    startup.run_program(main)
