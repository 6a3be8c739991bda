"""Flags for the optimizer and the precision of its states. Does not import torch."""

from dataclasses import dataclass
from typing import Any

from common.flags.args import flag
from common.flags.problems import Problems


@dataclass
class OptimizerArguments:
    """Optimizer."""

    optimizer: str = flag(
        "adamw",
        "adamw, or muon: Muon for the matrices of hidden layers and AdamW for the rest",
        choices=("adamw", "muon"),
    )
    muon_learning_rate: float | None = flag(
        None,
        "learning rate of Muon's matrices; empty: that of the other weights",
        low=0,
        only_with="optimizer=muon",
    )
    optimizer_dtype: str = flag(
        "fp32",
        "dtype of the master weights and optimizer states; bf16 halves their memory but loses updates "
        "smaller than 1/512 of a weight",
        choices=("fp32", "bf16"),
    )


def check_optimizer(args: Any, dtype: str, problems: Problems) -> None:
    """Add the problems of --optimizer and --optimizer_dtype in a step whose weights have this dtype."""
    has_adapters_alone = args.only_optimize_lora and all(role.lora_dim for role in args.roles().values())
    problems.add_if(
        args.optimizer == "muon" and has_adapters_alone,
        f"--optimizer {args.optimizer} has no matrix to train, because adapters are trained by AdamW; use "
        "--optimizer adamw, or --only_optimize_lora false",
    )
    if args.optimizer_dtype == "fp32":
        return
    problems.add_if(
        dtype != "bf16",
        f"--optimizer_dtype {args.optimizer_dtype} needs --dtype bf16, but this run uses {dtype}",
    )
    for name in ("offload", "critic_offload"):
        offload = getattr(args, name, "none")
        problems.add_if(
            offload in ("optimizer", "all"),
            f"--optimizer_dtype {args.optimizer_dtype} and --{name} {offload} exclude each other: on the CPU "
            f"DeepSpeed keeps such states only for its own Adam; use --{name} none or param, or "
            "--optimizer_dtype fp32",
        )
