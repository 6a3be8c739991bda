#!/usr/bin/env python
"""DPO: step 2 with --loss dpo. DeepSpeed-Chat's scripts of step2_dpo_finetuning run here unchanged."""

import runpy
import sys
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    sys.argv[1:1] = ["--loss", "dpo"]  # a later --loss counts
    runpy.run_module("step2_reward.main", run_name="__main__", alter_sys=True)
