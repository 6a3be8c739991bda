"""The same numbers on one rank, two, with accumulation, under every ZeRO stage, with LoRA, with offload, and
however the actor generates.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import program_runs as runs
import pytest
from program_runs import STEPS, read_curve, read_metrics, read_weights
from tiny_inputs import step_flags

pytestmark = pytest.mark.slow

NUM_STEPS, GLOBAL_ROWS = 3, 8
TOLERANCE = 1e-5
# Numbers that say where a run differs, if one does: every loss, every norm, and what was sampled and scored.
COMPARED = {
    1: ("sft/loss", "sft/grad_norm", "sft/eval_loss"),
    2: ("reward/loss", "reward/accuracy", "reward/margin", "reward/grad_norm", "reward/eval_margin"),
    3: (
        "objective/score", "objective/kl", "objective/reward", "rollout/response_tokens", "policy/loss",
        "policy/entropy", "policy/unsup_loss", "policy/grad_norm", "value/loss", "value/grad_norm",
    ),
}  # fmt: skip
ROUTERS = {
    1: ["sft/router_loss"],
    2: ["reward/router_loss"],
    3: ["policy/router_loss", "policy/unsup_router_loss"],
}
DISTILLED = ("distill/loss", "distill/divergence", "distill/teacher_logprob")
NORMS_APART = 1e-4  # a norm is summed in another order by every stage
EXPORTS = {1: ("export",), 2: ("export",), 3: ("export", "export_ema")}
# Two responses to a prompt, compared, used a step late, with all that an algorithm may ask for.
GROUPS = {
    "num_samples_per_prompt": 2, "rollout_staleness": 1, "rollout_correction": "tis", "top_k": 40,
    "replay_sampling_support": True, "dynamic_sampling_rounds": 1, "clip_range": 0.2, "clip_range_high": 0.3,
    "policy_loss": "ppo:dual_clip=3",
    "ppo_epochs": 2,
}  # fmt: skip
# Beside the rewards of groups: a teacher of another family.
TAUGHT = {"num_samples_per_prompt": 2, "ppo_epochs": 2, "temperature": 0.8}
TAUGHT |= {"distill_loss": "jsd", "distill_weight": 2.0, "distill_beta": 0.3}
COMMON = {"lr_scheduler_type": "linear", "num_warmup_steps": 2, "gradient_clipping": 1.0, "seed": 7}
COMMON |= {"save_interval": 0}  # test_resume.py has what a checkpoint holds


@dataclass(frozen=True)
class Job:
    """One run: a step and how it is spread over ranks, memory and numbers."""

    step: int
    zero: int = 0
    lora: bool = False
    offload: str = "none"
    dtype: str = "fp32"
    accumulation: int = 1
    ranks: int = 2
    family: str = "base"
    # Small weights stay whole under ZeRO-3 below DeepSpeed's threshold: all of a tiny model's, were it not 0.
    threshold: int | None = 0
    # Generation by the hybrid engine; the others sample by transformers' generate. tp 0: layer by layer.
    tp: int | None = None
    packed: int = 0  # tokens of a micro-batch; 0: padded, by rows
    algorithm: str = ""
    optimizer: str = "adamw"
    states: str = "fp32"  # of the optimizer
    overlaps: bool = False  # gradients fill several buckets, reduced while the backward pass goes on
    # Of steps 1 and 2, with which all models of step 3 begin: of one base, or each of a copy of its own.
    adapters: str = ""
    checkpointing: bool = False

    @property
    def name(self) -> str:
        parts = [f"step{self.step}", self.family, f"ranks{self.ranks}", f"zero{self.zero}", self.dtype]
        parts += ["lora"] if self.lora else []
        parts += [f"offload-{self.offload}"] if self.offload != "none" else []
        parts += [f"accumulation{self.accumulation}"] if self.accumulation > 1 else []
        parts += [f"hybrid-tp{self.tp}"] if self.tp is not None else []
        parts += [f"packed{self.packed}"] if self.packed else []
        parts += [self.algorithm] if self.algorithm else []
        parts += [self.optimizer] if self.optimizer != "adamw" else []
        parts += [f"states-{self.states}"] if self.states != "fp32" else []
        parts += ["overlap"] if self.overlaps else []
        parts += [f"{self.adapters}-adapters"] if self.adapters else []
        parts += ["checkpointing"] if self.checkpointing else []
        return "-".join(parts + (["threshold"] if self.threshold is None else []))

    @property
    def reference(self) -> "Job":
        """The plainest run that must give the same numbers; it computes a prompt for each of its answers."""
        kept = {name: getattr(self, name) for name in ("lora", "family", "algorithm", "optimizer")}
        kept["adapters"] = self.adapters and "separate"
        # A router loss is of a micro-batch: those of two ranks are two of one rank's.
        return Job(self.step, ranks=1, accumulation=1 + (self.family == "mixtral"), **kept)


def flags_of(job: Job, tiny: Any, folder: Path) -> dict[str, Any]:
    """Return the command line of a job as a dictionary."""
    rows = GLOBAL_ROWS // job.ranks // job.accumulation
    lora = 4 if job.lora else 0
    names = "." if lora and job.family == "mixtral" else None  # experts too
    rate = 5e-4 if lora else None  # of adapters: moves weights in three steps by what can be seen
    flags = COMMON | {
        "data_split": {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}[job.step],
        "output_dir": folder / job.name,
        "dtype": job.dtype,
        "offload": job.offload,
        "optimizer": job.optimizer,
        "muon_learning_rate": 1e-3 if job.optimizer == "muon" else None,
        "optimizer_dtype": job.states,
        "gradient_accumulation_steps": job.accumulation,
        "max_train_steps": 2 * NUM_STEPS if job.step < 3 and job.dtype == "bf16" else NUM_STEPS,
    }
    if job.overlaps or (job.zero == 3 and job.threshold is not None):
        flags["ds_config"] = folder / ("overlap.json" if job.overlaps else "threshold.json")
    # A router loss counts tokens that sequences share once.
    if job.step > 1 and job == job.reference and job.family != "mixtral":
        flags["no_share_prompts"] = True
    roles = ("actor_", "critic_")[: 1 if job.algorithm else 2] if job.step == 3 else ("",)
    flags |= {f"{role}gradient_checkpointing": True for role in roles if job.checkpointing}
    if job.packed:
        flags |= {"packed": True, "max_tokens_per_micro_batch": job.packed}
        flags |= {"max_tokens_per_scoring_pass": 2 * job.packed} if job.step == 3 else {}
    if job.step < 3:
        flags |= {
            "model_name_or_path": getattr(tiny, job.family),
            "per_device_train_batch_size": rows,
            "per_device_eval_batch_size": 2,
            "eval_fraction": 0.2,
            "dropout": 0.0,
            "learning_rate": 1e-3,
            "lora_learning_rate": rate,
            "zero_stage": job.zero,
            "lora_dim": lora,
            "lora_module_name": names,
            "weight_decay": 0.01,
        }
        return step_flags(tiny, job.step, **flags)
    if job.tp is not None:
        flags |= {
            "enable_hybrid_engine": True,
            "inference_tp_size": job.tp or 1,
            "unpin_actor_parameters": job.tp == 0,
            "generation_slots": 3,
            "release_inference_cache": job.lora,
        }
    if job.algorithm:
        is_taught = job.algorithm == "distill"
        flags |= TAUGHT | {"teacher_model_name_or_path": tiny.gpt2} if is_taught else GROUPS
        flags |= {"algorithm": job.algorithm, "reward": f"model:{tiny.reward}"}
        flags |= {"critic_model_name_or_path": None}
    else:
        flags |= {"critic_learning_rate": 1e-3, "critic_lora_dim": lora}
    flags |= {
        "actor_model_name_or_path": getattr(tiny, job.family),
        "unsupervised_dataset_name": tiny.text,
        "unsup_coef": 0.5,
        "max_prompt_seq_len": 20,
        "per_device_generation_batch_size": rows * job.accumulation // (2 if job.algorithm else 1),
        "per_device_training_batch_size": rows,
        "actor_learning_rate": 1e-3,
        "actor_lora_learning_rate": rate,
        "actor_zero_stage": job.zero,
        "critic_zero_stage": job.zero,
        "actor_lora_dim": lora,
        "actor_lora_module_name": names,
        "offload_reference_model": job.offload != "none",
        "offload_reward_model": job.offload != "none",
        "entropy_coef": 0.01,
        "enable_ema": True,
        "ema_decay": 0.5,
    }
    if job.adapters:  # their rank is that of --lora_dim above
        actor, critic, reward = (folder / job.adapters / role for role in ("actor", "critic", "reward"))
        flags |= {"actor_model_name_or_path": actor, "critic_model_name_or_path": critic}
        flags |= {"reward": f"model:{reward}", "actor_lora_dim": None, "critic_lora_dim": None}
    return step_flags(tiny, 3, **flags)


def make_jobs() -> list[Job]:
    """Return runs in which any two of stage, offload, adapters, cut, family and way of generating that can
    meet do meet; step 2, which shares all but its model with step 1, has a few. The first ones of a step are
    what the others are compared to.
    """
    jobs = []
    for step in STEPS:
        jobs += [Job(step, ranks=1), Job(step, ranks=1, lora=True)]
        jobs += [Job(step), Job(step, 3, True, "all"), Job(step, 3, accumulation=2, packed=200)]
        if step == 2:
            continue
        jobs += [Job(step, ranks=1, lora=True, family="gpt2")]
        jobs += [Job(step, ranks=1, accumulation=2), Job(step, ranks=1, packed=110)]
        jobs += [Job(step, 0, True, accumulation=2), Job(step, 2, True, packed=130)]
        jobs += [Job(step, 2, offload="optimizer", accumulation=2), Job(step, 3, dtype="bf16", packed=110)]
        jobs += [Job(step, 3, threshold=None), Job(step, 3, True, family="gpt2")]
        jobs += [Job(step, 2, True, "optimizer", dtype="bf16")]
    jobs += [Job(1, 1, accumulation=2, overlaps=True), Job(1, 2, offload="optimizer", overlaps=True)]
    for step, tp in ((1, None), (3, 1)):
        mixture = Job(step, 3, family="mixtral", tp=tp)
        jobs += [mixture.reference, mixture]
    for step, zero, tp in ((1, 0, None), (1, 3, None), (2, 3, None), (3, 2, None), (3, 3, 1), (3, 3, 0)):
        mixture = Job(step, zero, True, family="mixtral", tp=tp)
        jobs += [mixture.reference] * (mixture.reference not in jobs) + [mixture]
    muon = {"optimizer": "muon"}
    jobs += [Job(1, ranks=1, **muon), Job(1, 3, **muon), Job(1, 2, offload="optimizer", **muon)]
    jobs += [Job(1, 3, dtype="bf16", states="bf16"), Job(1, 1, dtype="bf16", states="bf16", **muon)]
    jobs += [Job(3, 0, True, tp=1), Job(3, 2, tp=2), Job(3, 3, tp=0), Job(3, 3, True, tp=2)]
    jobs += [Job(3, 3, dtype="bf16", tp=2), Job(3, ranks=1, algorithm="grpo")]
    jobs += [Job(3, lora=True, ranks=1, adapters="separate"), Job(3, lora=True, ranks=1, adapters="shared")]
    jobs += [Job(3, 0, True, adapters="shared", tp=2), Job(3, 2, True, adapters="shared")]
    jobs += [Job(3, 3, True, adapters="shared"), Job(3, 3, True, "all", adapters="shared", threshold=None)]
    jobs += [Job(3, 3, True, adapters="shared", tp=2), Job(3, 2, True, dtype="bf16", adapters="shared")]
    jobs += [Job(3, ranks=1, algorithm="distill"), Job(3, ranks=1, lora=True, algorithm="distill")]
    jobs += [
        Job(3, accumulation=2, packed=64, algorithm="distill"),
        Job(3, 3, offload="all", algorithm="distill"),
    ]
    jobs += [Job(3, 2, True, "optimizer", algorithm="distill")]
    return jobs + [Job(3, 2, algorithm="grpo", tp=1), Job(3, 3, algorithm="grpo", tp=2, packed=64)]


JOBS = make_jobs()


def params(jobs: list[Job]) -> list[Any]:
    """Return the jobs as parameters of a test."""
    return [pytest.param(job, id=job.name) for job in jobs]


@pytest.fixture(scope="module")
def wanted(request) -> list[Job]:
    """Return the jobs that the tests of this session look at, and what they are compared to."""
    asked = {p["job"] for p in runs.selected_params(request) if "job" in p}
    asked |= {job.reference for job in asked} | {job for job in JOBS if job == job.reference}
    return [job for job in JOBS if job in asked]


@pytest.fixture(scope="module")
def results(forks, tmp_path_factory, tiny, wanted) -> Path:
    """Run everything: in one process, and in two. The first run that fails ends those of its processes."""
    folder = tmp_path_factory.mktemp("matrix")
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    (folder / "threshold.json").write_text(json.dumps(threshold))
    overlap = {"zero_optimization": {"reduce_bucket_size": 5000, "overlap_comm": True}}  # not all weights fit
    (folder / "overlap.json").write_text(json.dumps(overlap))
    for ranks in (1, 2):
        for steps in ((1, 2), (3,)):
            mine = [job for job in wanted if job.ranks == ranks and job.step in steps]
            done = forks.run_all(
                [(j.step, flags_of(j, tiny, folder)) for j in mine], ranks=ranks, seconds=540
            )
            with open(folder / f"ranks{ranks}.log", "a") as log:
                log.write(done.text())
            if ranks == 1 and steps == (1, 2):
                save_adapters(folder)
    return folder


def save_adapters(folder: Path) -> None:
    """Give each role of step 3 the adapter of a run of step 1 or 2, of the one base and of a copy of it."""
    for role, step in (("actor", 1), ("critic", 2), ("reward", 2)):
        adapter = folder / Job(step, lora=True, ranks=1).name / "adapter"
        copies = [shutil.copytree(adapter, folder / kind / role) for kind in ("shared", "separate")]
        config = json.loads((adapter / "adapter_config.json").read_text())
        base = shutil.copytree(config["base_model_name_or_path"], folder / "bases" / role)
        text = json.dumps(config | {"base_model_name_or_path": str(base)})
        (copies[1] / "adapter_config.json").write_text(text)


def finished(results: Path, job: Job) -> Path:
    """Return the output of a job; fail when there is none."""
    assert (results / job.name / "export").is_dir(), (
        f"{job.name} did not end well; see test_every_run_ends_well"
    )
    return results / job.name


def test_every_run_ends_well(results, wanted):
    for ranks in (1, 2):
        log = (results / f"ranks{ranks}.log").read_text()
        assert log.count("ended well\n") == sum(job.ranks == ranks for job in wanted), log[-6000:]


def check_same(job: Job, found: Path, expected: Path) -> None:
    """Fail where losses, norms, samples or exported weights of two runs are apart."""
    names = [n for n in COMPARED[job.step] if not (job.algorithm and n.startswith("value/"))]
    names += list(DISTILLED) if job.algorithm == "distill" else []
    for name in names + ROUTERS.get(job.step, []) * (job.family == "mixtral"):
        tolerance = NORMS_APART if "norm" in name else TOLERANCE
        assert read_curve(found, name) == pytest.approx(read_curve(expected, name), abs=tolerance), name
        assert len(read_curve(found, name)) >= 2, name
    if job.step == 3:
        lines = [(folder / "samples.jsonl").read_text().splitlines() for folder in (found, expected)]
        texts = [[(r["prompt"], r["answer"]) for r in map(json.loads, of_run)] for of_run in lines]
        assert texts[0] == texts[1] and len(texts[0]) == 2 * NUM_STEPS
    for export in (*EXPORTS[job.step], *(["adapter"] if job.lora else [])):
        weights = [read_weights(folder / export) for folder in (found, expected)]
        apart = runs.largest_difference(*weights)
        assert apart < TOLERANCE, f"{export}: {apart}"


@pytest.mark.parametrize("job", params([j for j in JOBS if j.dtype == "fp32" and j != j.reference]))
def test_same_losses_and_weights(results, job):
    check_same(job, finished(results, job), finished(results, job.reference))


@pytest.mark.parametrize("job", params([j for j in JOBS if j.dtype == "bf16"]))
def test_bf16_is_finite_and_falls(results, job):
    for row in read_metrics(finished(results, job)):
        assert all(math.isfinite(value) for value in row.values()), row
    # what is sampled differs in bf16, so step 3 is judged by its loss on given text
    name = {1: "sft/loss", 2: "reward/loss", 3: "policy/unsup_loss"}[job.step]
    losses, exact = read_curve(results / job.name, name), read_curve(finished(results, job.reference), name)
    assert losses[0] == pytest.approx(exact[0], abs=0.05)
    assert sum(losses[-2:]) < sum(losses[:2])


def test_training_moves_the_weights(results, tiny):
    """Two runs that change nothing would agree, too."""
    for job in (j for j in JOBS if j == j.reference):
        before = read_weights(getattr(tiny, job.family))
        if job.step != 2:
            assert runs.largest_difference(before, read_weights(finished(results, job) / "export")) > 1e-4


def test_deepspeed_launcher(results, tiny, tmp_path):
    """Other steps and stages differ in nothing that a launcher sees."""
    job = Job(3, 3)
    (tmp_path / "threshold.json").write_text((results / "threshold.json").read_text())
    done = runs.run(runs.deepspeed("step3_ppo/main.py", *runs.as_flags(flags_of(job, tiny, tmp_path))))
    assert f"saved {tmp_path / job.name}/export" in done.stdout
    check_same(job, tmp_path / job.name, finished(results, job.reference))
