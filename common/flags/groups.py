"""Flags that several programs share, grouped by subject. Does not import torch."""

from dataclasses import dataclass

from common.flags.args import flag
from common.flags.value_forms import Interval

DEFAULT_DATA = ["Dahoas/rm-static"]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
# Flags that --auto chooses, in the programs that have them.
AUTO_FLAGS = (
    "max_tokens_per_micro_batch",
    "gradient_checkpointing",
    "actor_gradient_checkpointing",
    "critic_gradient_checkpointing",
    "zero_stage",
    "actor_zero_stage",
    "critic_zero_stage",
    "offload",
    "offload_reference_model",
    "offload_reward_model",
    "load_in_4bit",
    "generation_slots",
    "inference_tp_size",
    "release_inference_cache",
)
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")


@dataclass
class SourceArguments:
    """Data sources and formats."""

    data_path: list[str] = flag(
        DEFAULT_DATA,
        "data sets: files, folders, saved `datasets` folders, registered names or hub names, or a class of "
        "your own as MODULE:CLASS[:NAME or :ARGUMENT=VALUE,...]",
        is_usual=True,
    )
    data_output_path: str = flag("", "folder of the token cache; empty: ~/.cache/triptych", may_change=True)
    template: str = flag(
        "",
        "format of a conversation: human_assistant or one_line (`Human:` and `Assistant:` on separate lines "
        "or on one), chat (the tokenizer's chat template) or plain (the bare prompt); empty: that of the "
        "model's triptych.json or tokenizer, else human_assistant",
        choices=("human_assistant", "one_line", "chat", "plain"),
        is_usual=True,
    )
    max_bad_rows: int = flag(100, "stop if more than N rows cannot be read", may_change=True, low=0)
    score_column: str = flag(
        "helpfulness", "column that ranks the responses to a prompt, in data with one response per row"
    )
    columns: str = flag("", "names of the columns in your rows, such as prompt=question,response=answer")


@dataclass
class DataArguments(SourceArguments):
    """Data splits."""

    data_split: str = flag(
        "",
        "disjoint shares of each data set for steps 1, 2 and 3; empty: all rows, but 2,4,4 of the default "
        "data set; the shares depend only on the seed",
        is_usual=True,
    )
    data_weights: list[float] = flag(
        [],
        "weight of each --data_path, in their order: with 3 0.5 an epoch has the rows of the first three "
        "times, and half of those of the second, another half in each epoch; empty: every row once",
        above=0,
    )
    eval_fraction: float = flag(
        0.05,
        "fraction of a data set to hold out if it has no evaluation split",
        low=0,
        below=1,
        is_usual=True,
    )


@dataclass
class TokenizerArguments:
    """Tokenizer and end-of-turn token."""

    add_eot_token: bool = flag(False, "add --eot_token to the vocabulary if the tokenizer lacks it")
    chat_template_kwargs: str = flag(
        "",
        'variables for the chat template as JSON, such as {"enable_thinking": false}; empty: those that the'
        " model was trained with",
    )
    eot_token: str = flag(
        "",
        "text of the end-of-turn token; empty: the token that ends turns in the chat template, else EOS",
    )
    trust_remote_code: bool = flag(False, "run Python code that comes with a model", may_change=True)


@dataclass
class DecodeArguments:
    """Decoding."""

    no_cuda_graphs: bool = flag(
        False,
        "do not capture decoding passes in CUDA graphs; models that cannot be captured never are",
        may_change=True,
    )


@dataclass
class ScheduleArguments:
    """Training length and learning-rate schedule."""

    gradient_accumulation_steps: int = flag(
        1, "micro-batches per optimizer step", may_change=True, low=1, is_usual=True
    )
    num_train_epochs: int = flag(1, "passes over the data", may_change=True, low=1, is_usual=True)
    max_train_steps: int = flag(
        0, "stop after N steps; 0: train for whole epochs", may_change=True, low=0, is_usual=True
    )
    lr_scheduler_type: str = flag(
        "cosine",
        "learning-rate schedule",
        choices=SCHEDULES,
    )
    num_warmup_steps: int = flag(
        0, "optimizer steps of linear warm-up", low=0, only_with="lr_scheduler_type!=constant"
    )


@dataclass
class PackingArguments:
    """Packing."""

    packed: bool = flag(
        False,
        "pack micro-batches up to a token budget; it is --max_tokens_per_micro_batch, by default batch size "
        "x maximum length",
        may_change=True,
        is_usual=True,
    )
    max_tokens_per_micro_batch: int = flag(
        0,
        "token budget of a micro-batch, in place of a number of rows; 0: by rows, but 2,048 in steps 1 and 2"
        " on a CPU",
        may_change=True,
        low=0,
    )


@dataclass
class SharingArguments:
    """Shared prompts."""

    no_share_prompts: bool = flag(
        False, "compute the prompt again for each of its responses instead of once", may_change=True
    )


@dataclass
class RunArguments:
    """Output, precision, offloading and seeds."""

    output_dir: str = flag(
        "",
        "folder for everything that the run saves; empty: nothing is saved",
        may_change=True,
        is_usual=True,
    )
    auto: bool = flag(
        False,
        "choose what memory and speed depend on by tools.plan; of the flags that are not given: ZeRO stage, "
        "offload, checkpointing, tokens per pass, generation slots and ranks, 4 bits under LoRA if nothing "
        "else fits; the rows of an optimizer step stay",
        may_change=True,
        is_usual=True,
    )
    dtype: str = flag(
        "",
        "dtype of weights and activations; empty: bf16 on a GPU that supports it, else fp32; auto: the "
        "same, but on a CPU the faster of fp32 and bf16, measured at start-up, or the dtype of the resumed "
        "run",
        choices=("fp32", "bf16", "fp16", "auto"),
        is_usual=True,
    )
    offload: str = flag(
        "none",
        "what to offload to the CPU: optimizer state, parameters (ZeRO-3 only) or all; without a value: all",
        choices=("none", "optimizer", "param", "all"),
        may_change=True,
    )
    gradient_clipping: float = flag(1.0, "maximum global gradient norm; 0: no clipping", low=0)
    pad_vocab_multiple: int = flag(
        1, "pad the vocabulary to a multiple of this number during training", low=1, high=2**16
    )
    seed: int = flag(
        1234, "seed of shuffling, dropout, new weights and sampling", low=-(2**32), high=2**32, is_usual=True
    )
    deterministic: bool = flag(
        False,
        "use only deterministic GPU operations (slower); an operation without a deterministic form raises "
        "an error",
        may_change=True,
    )
    tf32: str = flag(
        "auto",
        "fp32 matrix products of a GPU in TF32: faster, 10 bits of mantissa; auto: unless --dtype is fp32",
        choices=("auto", "true", "false"),
    )
    trackers: list[str] = flag(
        [], "experiment trackers to log the metrics to", choices=TRACKERS, may_change=True
    )
    tensorboard_path: str = flag(
        "",
        "folder of the TensorBoard event files; empty: OUTPUT_DIR/tensorboard",
        may_change=True,
        only_with="trackers=tensorboard",
    )
    log_interval: int = flag(
        1, "print a line every N steps; metrics.jsonl has every step", may_change=True, low=1
    )
    digest_interval: int = flag(
        1,
        "write digests of every Nth step, with which tools.replay checks the run; 0: none",
        may_change=True,
        low=0,
    )
    ds_config: str = flag("", "JSON file to merge over the DeepSpeed configuration that the flags produce")
    plugins: list[str] = flag(
        [],
        "modules to import first, which register data sets, algorithms, losses",
        may_change=True,
        is_usual=True,
    )
    dry_run: bool = flag(
        False,
        "check flags and first rows, print the configuration; no model is loaded",
        may_change=True,
        is_usual=True,
    )
    local_rank: int = flag(-1, "local rank, set by the deepspeed launcher", may_change=True, low=-1)


@dataclass
class CheckpointArguments:
    """Checkpointing, resuming and fault tolerance."""

    save_interval: Interval = flag(
        Interval("500"),
        "save a checkpoint every N steps, every epoch, or at a time interval such as 30m, and at the end; "
        "0: only when the run is stopped",
        may_change=True,
        is_usual=True,
    )
    save_total_limit: int = flag(
        2, "number of checkpoints to keep, the newest; 0: keep all", may_change=True, low=0
    )
    resume: str = flag(
        "auto",
        "auto: resume from the newest valid checkpoint in --output_dir; never: exit if the folder has an "
        "earlier run; overwrite: replace that run; or the path of a checkpoint",
        may_change=True,
        is_usual=True,
    )
    max_bad_steps: int = flag(
        3, "maximum number of non-finite steps to skip before the run stops", may_change=True, low=0
    )
    collective_timeout: float = flag(
        1800.0, "seconds to wait for a rank before all ranks are stopped", may_change=True, low=1, high=1e7
    )
