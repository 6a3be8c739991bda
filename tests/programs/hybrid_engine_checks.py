"""What a hybrid engine promises, check by check; run on every rank by hybrid_engine_worker.py.

A check returns {what: complaint or ""}, or texts to compare with those of other worlds.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from hybrid_engines import build_tiny_engine
from plain_logits import compute_logits
from transformers import AutoModelForCausalLM

from benchmarks.bench_reshard import SwitchMeter
from common.data.packed_batch import pad_sequences
from common.generation.decode import SamplingOptions
from common.generation.generate import Generation
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.generation.reshard_plan import group_by_layers
from common.models.lora import trained_weights
from common.models.output_head import token_logprobs
from common.ranks import distributed
from common.ranks.zero3 import gather_whole, is_sharded, local_shard

VOCABULARY = 320
NEW_TOKENS = 8
WHENS = ("before", "after")
LENGTHS_OF_RANK = ((3, 7, 5), (11, 2, 9, 4), (1, 6, 8), (13, 5, 10))  # of prompts: numbers and widths differ
# tensor-parallel size -> (slots, 0: the default; whether the prompts change places)
SLOTS_OF_SIZE = {
    1: ((0, False), (3, True), (1, False)),
    2: ((3, False), (0, True)),
    4: ((1, False), (3, True)),
}
SAMPLED_LENGTHS = (3, 7, 5, 12, 9, 2, 8, 6)  # dealt out to the ranks
Found = dict[str, Any]


def make_prompt(number: int, length: int) -> torch.Tensor:
    """Return the same tokens wherever it is called."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, VOCABULARY, (length,), generator=generator)


def own_prompts() -> list[torch.Tensor]:
    """Return prompts that no other rank has."""
    rank = distributed.rank()
    return [make_prompt(10 * rank + i, length) for i, length in enumerate(LENGTHS_OF_RANK[rank])]


def texts_of(out: Generation) -> list[list[int]]:
    """Return the responses without what fills them up."""
    return [ids[mask].tolist() for ids, mask in zip(out.response_ids, out.response_mask, strict=True)]


def train_once(engine: Any) -> None:
    """Make an optimizer step on data that differ from rank to rank."""
    engine.train()
    ids = torch.stack([make_prompt(100 * distributed.rank() + i, 6) for i in range(2)])
    loss = compute_logits(engine, ids, torch.ones_like(ids)).float().square().mean()
    engine.backward(loss)
    engine.step()


@contextmanager
def hybrid_engine(engine: Any, **options: Any) -> Iterator[HybridEngine]:
    """Give a hybrid engine, whose process groups go with it: hundreds of them would take all threads."""
    hybrid = HybridEngine(engine, HybridOptions(**({"enabled": True} | options)))
    try:
        yield hybrid
    finally:
        for group in (hybrid.groups.tp_group, hybrid.groups.gather_group):
            if group not in (None, dist.group.WORLD):
                dist.destroy_process_group(group)


class Reference:
    """Greedy texts of this rank's prompts by transformers, one at a time, and a stop token for all ranks."""

    def __init__(self, plain: Any) -> None:
        plain.eval()
        self.prompts = own_prompts()
        free = [self._continue(plain, prompt) for prompt in self.prompts]
        rows = [text for texts in distributed.gather_objects(free) for text in texts]
        self.stop = pick_stop(rows)
        # What follows a token does not change what comes before it: this is the text with that stop token.
        self.texts = [text[: text.index(self.stop) + 1] if self.stop in text else text for text in free]

    @staticmethod
    def _continue(plain: Any, prompt: torch.Tensor) -> list[int]:
        plain.generation_config.eos_token_id = None
        mask = torch.ones_like(prompt[None])
        more = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "use_cache": True, "synced_gpus": False}
        return plain.generate(prompt[None], attention_mask=mask, do_sample=False, **more)[
            0, len(prompt) :
        ].tolist()


@cache
def untrained_reference(folder: str) -> Reference:
    """Return the texts of a model as it was saved."""
    return Reference(AutoModelForCausalLM.from_pretrained(folder))


def trained_reference(folder: str, engine: Any) -> Reference:
    """Return the texts of the weights that the engine has now, gathered, adapters merged."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    targets, weights = dict(plain.named_parameters()), trained_weights(engine.module)
    assert targets.keys() == weights.keys()
    for name, weight in weights.items():
        with torch.no_grad(), gather_whole(weight.tensors()):
            targets[name].copy_(weight.merged())
    return Reference(plain)


def pick_stop(rows: list[list[int]]) -> int:
    """Return the token that ends most rows in their middle, but not all of them."""

    def count(token: int) -> int:
        return sum(token in row and 0 < row.index(token) < len(row) - 1 for row in rows)

    candidates = {t for row in rows for t in row if sum(t in other for other in rows) < len(rows)}
    best = max(sorted(candidates), key=count)
    assert count(best), "no row has a stop token in its middle"
    return best


def compare_greedy(hybrid: HybridEngine, reference: Reference) -> Found:
    """Return complaints about this rank's greedy texts, their log-probabilities, traffic and the trainer."""
    engine, stop = hybrid.engine, reference.stop
    lengths = torch.tensor([len(prompt) for prompt in reference.prompts])
    ids, mask = pad_sequences(torch.cat(reference.prompts), lengths, pad_value=stop, on_left=True)
    sampling = SamplingOptions(NEW_TOKENS, stop_token_id=stop, pad_token_id=stop, do_sample=False)
    if hybrid.is_sharded:
        engine.empty_partition_cache()  # an evaluation leaves weights whole when there is room: nothing moves
    before = {name: local_shard(p).detach().clone() for name, p in engine.module.named_parameters()}
    with hybrid.generation_mode():
        out = hybrid.generate(ids, mask, torch.arange(len(ids)), sampling)
    is_left = hybrid.gather_by_layer or all(p.is_meta for p in hybrid.inference_module.parameters())
    parameters = dict(engine.module.named_parameters())
    changed = [name for name, p in parameters.items() if not local_shard(p).equal(before[name])]
    found = {"trainer": f"changed: {changed}" if changed else "", "left": "" if is_left else "weights stayed"}
    texts, is_stopped = texts_of(out), [text[-1] == stop for text in reference.texts]
    found["texts"] = "" if texts == reference.texts else f"{texts}, expected {reference.texts}"
    if out.is_finished.tolist() != is_stopped or not (out.response_ids[~out.response_mask] == stop).all():
        found["texts"] += f" wrong ends: {out.is_finished.tolist()}, {out.response_ids.tolist()}"
    engine.eval()
    with torch.no_grad():
        whole = torch.cat([ids, out.response_ids], dim=1)
        whole_mask = torch.cat([mask, out.response_mask], dim=1).long()
        logits = compute_logits(engine, whole, whole_mask, num_last=out.response_ids.shape[1] + 1)[:, :-1]
        expected = torch.where(out.response_mask, token_logprobs(logits, out.response_ids), 0.0)
    gap = float((out.logprobs - expected).abs().max())
    found["logprobs"] = "" if gap <= 1e-5 else f"off by {gap:.1e}"
    received, must_move = hybrid.costs.received_bytes, hybrid.is_sharded and not hybrid.gather_by_layer
    found["traffic"] = "" if (received > 0) == must_move else f"{received} bytes came"
    return found


def check_greedy(folder: str, stage: int, tp_sizes: tuple[int, ...], lora_dim: int = 0) -> Found:
    """Hybrid engines of all sizes before and after an update; adapters only after, when they are not zero."""
    engine, found = build_tiny_engine(folder, stage, lora_dim), {}
    sharded = [p for p in engine.module.parameters() if is_sharded(p)]
    assert len(sharded) == (len(list(engine.module.parameters())) if stage == 3 else 0)
    with ExitStack() as stack:
        hybrids = {t: stack.enter_context(hybrid_engine(engine, inference_tp_size=t)) for t in tp_sizes}
        for when in WHENS[bool(lora_dim) :]:
            reference = untrained_reference(folder)
            if when == "after":
                train_once(engine)
                reference = trained_reference(folder, engine)
            for tp_size, hybrid in hybrids.items():
                one = compare_greedy(hybrid, reference)
                found |= {f"{tp_size} {when} {what}": complaint for what, complaint in one.items()}
    if lora_dim:
        adapters = [w.lora_b for w in trained_weights(engine.module).values() if w.lora_b is not None]
        assert adapters and any(bool(local_shard(b).any()) for b in adapters), "zeros would show nothing"
    engine.destroy()
    return found


def check_slices(folder: str, num_tokens: int, smallest_sharded: int | None, **options: str) -> Found:
    """Slices of all sizes, before and after an update, against those of the gathered weights."""
    more = {"num_tokens": num_tokens, "smallest_sharded": smallest_sharded}
    engine, found = build_tiny_engine(folder, 3, **more, **options), {}
    parameters = list(engine.module.parameters())
    with ExitStack() as stack:
        hybrids = {
            t: stack.enter_context(hybrid_engine(engine, inference_tp_size=t, tp_gather_partition_size=1))
            for t in (1, 2, 4)
        }
        for when in WHENS:
            if when == "after":
                train_once(engine)
            num_whole = sum(p.ds_status is ZeroParamStatus.AVAILABLE for p in parameters)
            if smallest_sharded is None and when == "after":
                found["small"] = "" if num_whole else "after an update small weights are whole on every rank"
            loaded = {tp_size: load_slices(hybrid) for tp_size, hybrid in hybrids.items()}
            for tp_size, hybrid in hybrids.items():  # to gather ends the time of small weights as whole ones
                slices, one = loaded[tp_size]
                one["slices"] = compare_slices(hybrid, slices)
                found |= {f"{tp_size} {when} {what}": complaint for what, complaint in one.items()}
    engine.destroy()
    return found


def load_slices(hybrid: HybridEngine) -> tuple[dict[str, torch.Tensor], Found]:
    """Return the slices, and complaints about the bytes that a load received and made."""
    resharder, weights = hybrid._resharder, trained_weights(hybrid.module)
    with SwitchMeter() as meter:
        slices = {name: weight.parameter for name, weight in resharder.load()}
    received = resharder.costs.received_bytes
    found = {"received": "" if received == meter.received_bytes else f"{meter.received_bytes} bytes came"}
    sizes = {name: w.parameter.ds_numel * w.parameter.element_size() for name, w in weights.items()}
    largest = max(sum(sizes[name] for name in names) for names in group_by_layers(list(sizes), 1))
    bound = sum(part.nbytes for part in slices.values()) * 1.05 + 2 * largest
    found["peak"] = "" if meter.peak_bytes <= bound else f"held {meter.peak_bytes}, at most {bound}"
    return slices, found


def compare_slices(hybrid: HybridEngine, slices: dict[str, torch.Tensor]) -> str:
    """Return a complaint if a slice is not that of the gathered weight."""
    wrong = []
    for name, weight in trained_weights(hybrid.module).items():
        with torch.no_grad(), gather_whole([weight.parameter]):
            whole = weight.parameter.data.clone()
        wanted = hybrid._cuts[name].take(whole, hybrid.layout.tp_rank) if name in hybrid._cuts else whole
        if not (torch.equal(slices[name], wanted) and slices[name].is_contiguous()):
            wrong.append(name)
    return f"wrong slices: {wrong}" if wrong else ""


def check_by_layer(folder: str) -> Found:
    """Weights gathered layer by layer: ranks with few prompts keep step with those that have many."""
    engine, found = build_tiny_engine(folder, stage=3), {}
    for num_slots in (0, 2):
        with hybrid_engine(engine, gather_by_layer=True, num_slots=num_slots) as hybrid:
            assert hybrid.gather_by_layer
            one = compare_greedy(hybrid, untrained_reference(folder))
        found |= {f"{num_slots} {what}": complaint for what, complaint in one.items()}
    engine.destroy()
    return found


def sample(
    hybrid: HybridEngine, stop: int, *, repeat: int = 1, num_samples: int = 1, permuted: bool = False
) -> list[list[int]]:
    """Return the sampled texts of SAMPLED_LENGTHS' prompts, those of all ranks, by sample id."""
    rows = list(range(distributed.rank(), len(SAMPLED_LENGTHS), distributed.world_size()))
    rows = [row for row in rows for _ in range(repeat)]
    per_prompt = repeat * num_samples
    samples = [per_prompt * row + i % repeat + k for i, row in enumerate(rows) for k in range(num_samples)]
    if permuted:
        rows, samples = rows[1:] + rows[:1], samples[1:] + samples[:1]
    prompts = [make_prompt(1000 + row, SAMPLED_LENGTHS[row]) for row in rows]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids, mask = pad_sequences(torch.cat(prompts), lengths, on_left=True)
    sampling = SamplingOptions(NEW_TOKENS, stop, pad_token_id=0, temperature=1.5, top_p=0.9, seed=11)
    with hybrid.generation_mode():
        out = hybrid.generate(ids, mask, torch.tensor(samples), sampling, num_samples=num_samples)
    texts: dict[int, list[int]] = {}
    for of_rank in distributed.gather_objects(dict(zip(samples, texts_of(out), strict=True))):
        texts |= of_rank
    return [texts[sample] for sample in sorted(texts)]


def check_sampled(folder: str, tp_sizes: tuple[int, ...]) -> Found:
    """Return texts, not complaints: they are compared across worlds."""
    engine, found = build_tiny_engine(folder, stage=3), {}
    with hybrid_engine(engine) as hybrid:
        stop = pick_stop(sample(hybrid, stop=-1))
    for tp_size in tp_sizes:
        with hybrid_engine(engine, inference_tp_size=tp_size) as hybrid:
            for num_slots, permuted in SLOTS_OF_SIZE[tp_size]:
                hybrid.generator.num_slots = num_slots
                found[f"once: t {tp_size}, {num_slots} slots"] = sample(hybrid, stop, permuted=permuted)
            hybrid.generator.num_slots = 3
            found[f"thrice: t {tp_size}, 3 slots"] = sample(hybrid, stop, num_samples=3)
            if tp_size == 1:
                hybrid.generator.num_slots = 0
                found["thrice: t 1, 0 slots"] = sample(hybrid, stop, num_samples=3)
                found["thrice: t 1, prompts repeated"] = sample(hybrid, stop, repeat=3)
    with hybrid_engine(engine, gather_by_layer=True, num_slots=3) as hybrid:
        found["once: by layer"] = sample(hybrid, stop)
        found["thrice: by layer"] = sample(hybrid, stop, num_samples=3)
    engine.destroy()
    return found
