"""The hybrid engine on several ranks: the trainer's weights, transformers' texts, and no trace left.

test_hybrid_engine_ranks.py runs it on 1, 2 and 4 ranks; by hand: torchrun --nproc_per_node N -m pytest FILE.
All ranks run all cases together; the first that fails ends all of them.
"""

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from hybrid_engines import build_tiny_engine
from plain_logits import compute_logits, plain_logprobs
from pretended_gpu import pretended_gpu
from tiny_configs import MIXTURES, VARIANTS
from transformers import AutoModelForCausalLM

from benchmarks.bench_reshard import SwitchMeter
from common.data.packed_batch import pad_sequences
from common.generation.decode import SamplingOptions
from common.generation.generate import Generation, PromptBatch
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.generation.resharding import group_by_layers
from common.models.lora import trained_weights
from common.ranks import distributed
from common.ranks.zero3 import gather_whole, is_sharded, local_shard

pytestmark = pytest.mark.usefixtures("process_group")

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY = 320
NEW_TOKENS = 8
WHENS = ("before", "after")
LENGTHS_OF_RANK = ((3, 7, 5), (11, 2, 9, 4), (1, 6, 8), (13, 5, 10))  # of prompts: numbers and widths differ
# (ranks, stage, families, sizes): every family once on two ranks, a third of them with each stage
GREEDY = (
    (4, 3, ("llama", "gpt2"), (1, 2, 4)),
    (4, 0, ("gpt2", *VARIANTS), (2, 4)),
    (2, 0, ("opt", "gpt2", "gptj", "bloom", "falcon_alibi", "qwen2"), (1, 2)),
    (2, 2, ("llama", "falcon", "mistral", "gemma", "qwen3"), (1, 2)),
    (2, 3, ("gpt_neox", "falcon_new", "mistral_window", "gemma2", "phi"), (1, 2)),
    (2, 3, MIXTURES, (1,)),  # no plan cuts experts
)
# Conv1D; grouped heads; those in one projection; experts
LORA = (
    (2, 3, ("gpt2",), (1, 2)),
    (2, 0, ("falcon_new",), (2,)),
    (4, 3, ("llama",), (2,)),
    (2, 3, ("mixtral", "gpt_oss", "deepseek_v3"), (1,)),
    (2, 0, ("qwen3_moe", "gpt_oss"), (1,)),
)
# tensor-parallel size -> (slots, 0: the default; whether the prompts change places)
SLOTS_OF_SIZE = {1: ((0, False), (3, True)), 2: ((3, False), (0, True)), 4: ((1, False), (3, True))}
CONTIGUOUS = {"inference_tp_size": 2, "inference_tp_groups": "contiguous"}
SAMPLED_LENGTHS = (3, 7, 5, 12, 9, 2, 8, 6)  # dealt out to the ranks
ON_TWO = pytest.mark.skipif(NUM_RANKS != 2, reason="for two ranks")
ON_FOUR = pytest.mark.skipif(NUM_RANKS != 4, reason="for four ranks")


def cases_of(table: tuple) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return (stage, family, sizes) of what these ranks do."""
    rows = [row for row in table if row[0] == NUM_RANKS]
    return [(stage, family, sizes) for _, stage, families, sizes in rows for family in families]


@pytest.fixture
def model_folder(tiny_model_folder) -> Callable[[str], str]:
    """`tiny_model_folder` of rank 0, for all ranks."""
    return lambda family: distributed.gather_objects(tiny_model_folder(family))[0]


@pytest.fixture
def tiny_engine() -> Iterator[Any]:
    """`build_tiny_engine`; the engines go at the end: they are in cycles with their hooks."""
    engines = []

    def build(*args: Any, **options: Any) -> Any:
        engines.append(build_tiny_engine(*args, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.destroy()
    gc.collect()


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
    ids = ids.to(distributed.device())
    loss = compute_logits(engine, ids, torch.ones_like(ids)).float().square().mean()
    engine.backward(loss)
    engine.step()


@contextmanager
def hybrid_engine(engine: Any, **options: Any) -> Iterator[HybridEngine]:
    """Give a hybrid engine, whose process groups go with it: hundreds of them would take all threads."""
    hybrid = HybridEngine(engine, HybridOptions(**options))
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


def check_greedy(hybrid: HybridEngine, reference: Reference) -> None:
    """Texts are the reference's, log-probabilities the trainer's, bytes came only to shards, and the trainer
    keeps every bit.
    """
    engine, stop = hybrid.engine, reference.stop
    lengths = torch.tensor([len(prompt) for prompt in reference.prompts])
    ids, mask = pad_sequences(torch.cat(reference.prompts), lengths, pad_value=stop, on_left=True)
    sampling = SamplingOptions(NEW_TOKENS, stop_token_id=stop, pad_token_id=stop, do_sample=False)
    if hybrid.is_sharded:
        engine.empty_partition_cache()  # an evaluation leaves weights whole when there is room: nothing moves
    before = {name: local_shard(p).detach().clone() for name, p in engine.module.named_parameters()}
    with hybrid.generation_mode():
        out = hybrid.generate(PromptBatch(ids, mask, torch.arange(len(ids))), sampling)
    assert hybrid.gather_by_layer or all(p.is_meta for p in hybrid.inference_module.parameters())
    for name, parameter in engine.module.named_parameters():
        assert local_shard(parameter).equal(before[name]), f"{name} has changed"
    assert texts_of(out) == reference.texts
    assert out.is_finished.tolist() == [text[-1] == stop for text in reference.texts]
    assert (out.response_ids[~out.response_mask] == stop).all()
    engine.eval()
    with torch.no_grad():
        whole = torch.cat([ids, out.response_ids], dim=1)
        whole_mask = torch.cat([mask, out.response_mask], dim=1).long()
        logits = compute_logits(engine, whole, whole_mask, num_last=out.response_ids.shape[1] + 1)[:, :-1]
        expected = torch.where(out.response_mask, plain_logprobs(logits, out.response_ids), 0.0)
    torch.testing.assert_close(out.logprobs, expected, atol=1e-5, rtol=0)
    assert (hybrid.received_bytes > 0) == (hybrid.is_sharded and not hybrid.gather_by_layer)


def check_sizes(
    folder: str, engine: Any, tp_sizes: tuple[int, ...], whens: tuple[str, ...] = WHENS, **options: Any
) -> None:
    """Hybrid engines of all sizes before and after an update."""
    with ExitStack() as stack:
        kinds = [{"inference_tp_size": t} for t in tp_sizes]
        kinds += [CONTIGUOUS] if 2 in tp_sizes and NUM_RANKS == 4 else []
        hybrids = [stack.enter_context(hybrid_engine(engine, **kind, **options)) for kind in kinds]
        for when in whens:
            reference = untrained_reference(folder)
            if when == "after":
                train_once(engine)
                reference = trained_reference(folder, engine)
            for hybrid in hybrids:
                check_greedy(hybrid, reference)


@pytest.mark.parametrize(("stage", "family", "tp_sizes"), cases_of(GREEDY))
def test_greedy_generation(stage, family, tp_sizes, model_folder, tiny_engine):
    folder = model_folder(family)
    engine = tiny_engine(folder, stage)
    parameters = list(engine.module.parameters())
    assert sum(map(is_sharded, parameters)) == (len(parameters) if stage == 3 else 0)
    check_sizes(folder, engine, tp_sizes)


@pytest.mark.parametrize("merges", ["true", "false"])
@pytest.mark.parametrize(("stage", "family", "tp_sizes"), cases_of(LORA))
def test_adapters_act_in_generation(stage, family, tp_sizes, merges, model_folder, tiny_engine):
    folder = model_folder(family)
    engine = tiny_engine(folder, stage, 2, lora_names=".")
    check_sizes(folder, engine, tp_sizes, ("after",), merge_adapters=merges)
    adapters = [w.lora_b for w in trained_weights(engine.module).values() if w.lora_b is not None]
    assert adapters and any(bool(local_shard(b).any()) for b in adapters), "zeros would show nothing"


@ON_FOUR
@pytest.mark.parametrize(
    ("family", "num_tokens", "smallest_sharded", "options"),
    [
        ("gpt2", 323, 0, {}),
        ("gpt2", 320, None, {}),  # small weights stay whole
        ("llama", 320, 99, {"dtype": "bf16", "offload": "all"}),
    ],
)
def test_slices_are_those_of_the_gathered_weights(
    family, num_tokens, smallest_sharded, options, model_folder, tiny_engine
):
    """Before and after an update; as many bytes come as it says, and little is held besides the slices."""
    more = {"num_tokens": num_tokens, "smallest_sharded": smallest_sharded}
    engine = tiny_engine(model_folder(family), 3, **more, **options)
    with ExitStack() as stack:
        hybrids = [
            stack.enter_context(hybrid_engine(engine, inference_tp_size=t, tp_gather_partition_size=1))
            for t in (1, 2, 4)
        ]
        hybrids.append(stack.enter_context(hybrid_engine(engine, tp_gather_partition_size=1, **CONTIGUOUS)))
        for when in WHENS:
            if when == "after":
                train_once(engine)
                is_whole = [p.ds_status is ZeroParamStatus.AVAILABLE for p in engine.module.parameters()]
                assert any(is_whole) or smallest_sharded is not None
            loaded = [load_slices(hybrid) for hybrid in hybrids]
            # What follows gathers, which ends the time of small weights as whole ones.
            for hybrid, slices in zip(hybrids, loaded, strict=True):
                for name, weight in trained_weights(hybrid.module).items():
                    with torch.no_grad(), gather_whole([weight.parameter]):
                        wanted = weight.parameter.data.clone()
                    if name in hybrid._cuts:
                        wanted = hybrid._cuts[name].take(wanted, hybrid.layout.tp_rank)
                    assert torch.equal(slices[name], wanted) and slices[name].is_contiguous(), name


def load_slices(hybrid: HybridEngine) -> dict[str, torch.Tensor]:
    """Return the slices; the bytes that a load received and made are those that a meter counts."""
    resharder, weights = hybrid._resharder, trained_weights(hybrid.module)
    with SwitchMeter() as meter:
        slices = {name: weight.parameter for name, weight in resharder.load()}
    assert resharder.received_bytes == meter.received_bytes
    sizes = {name: w.parameter.ds_numel * w.parameter.element_size() for name, w in weights.items()}
    largest = max(sum(sizes[name] for name in names) for names in group_by_layers(list(sizes), 1))
    assert meter.peak_bytes <= sum(part.nbytes for part in slices.values()) * 1.05 + 2 * largest
    return slices


@ON_FOUR
@pytest.mark.parametrize(("family", "num_slots"), [("bloom", 0), ("gemma2", 2)])
def test_ranks_that_gather_layer_by_layer_keep_step(family, num_slots, model_folder, tiny_engine):
    """They have different numbers of prompts, of different lengths, that end at different times."""
    folder = model_folder(family)
    with hybrid_engine(
        tiny_engine(folder, 3), unpin_actor_parameters=True, generation_slots=num_slots
    ) as hybrid:
        assert hybrid.gather_by_layer
        check_greedy(hybrid, untrained_reference(folder))


def sample(hybrid: HybridEngine, stop: int, *, permuted: bool = False) -> list[list[int]]:
    """Return the sampled texts of SAMPLED_LENGTHS' prompts, those of all ranks, by sample id."""
    rows = list(range(distributed.rank(), len(SAMPLED_LENGTHS), distributed.world_size()))
    if permuted:
        rows = rows[1:] + rows[:1]
    prompts = [make_prompt(1000 + row, SAMPLED_LENGTHS[row]) for row in rows]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids, mask = pad_sequences(torch.cat(prompts), lengths, on_left=True)
    sampling = SamplingOptions(NEW_TOKENS, stop, pad_token_id=0, temperature=1.5, top_p=0.9, seed=11)
    with hybrid.generation_mode():
        out = hybrid.generate(PromptBatch(ids, mask, torch.tensor(rows)), sampling)
    texts: dict[int, list[int]] = {}
    for of_rank in distributed.gather_objects(dict(zip(rows, texts_of(out), strict=True))):
        texts |= of_rank
    return [texts[sample] for sample in sorted(texts)]


def test_sampled_texts_depend_on_nothing_but_sample_and_weights(model_folder, tiny_engine):
    """Not on slots, order, ranks or tensor-parallel size."""
    engine, found = tiny_engine(model_folder("llama"), 3), []
    with hybrid_engine(engine) as hybrid:
        stop = pick_stop(sample(hybrid, stop=-1))
    for tp_size in (size for size in (1, 2, 4) if size <= NUM_RANKS):
        with hybrid_engine(engine, inference_tp_size=tp_size) as hybrid:
            for num_slots, permuted in SLOTS_OF_SIZE[tp_size]:
                hybrid.generator.num_slots = num_slots
                found.append(sample(hybrid, stop, permuted=permuted))
    if NUM_RANKS > 1:
        with hybrid_engine(engine, **CONTIGUOUS) as hybrid:
            found.append(sample(hybrid, stop))
            neighbours = [list(range(first, first + 2)) for first in range(0, NUM_RANKS, 2)]
            assert hybrid.layout.ranks.T.tolist() == neighbours
    with hybrid_engine(engine, unpin_actor_parameters=True, generation_slots=3) as hybrid:
        found.append(sample(hybrid, stop))
    file = Path(os.environ["SAMPLED_TEXTS"])
    if NUM_RANKS == 1:
        file.write_text(json.dumps(found[0]))
    expected = json.loads(file.read_text())
    assert all(texts == expected for texts in found)
    assert len(expected) == len(SAMPLED_LENGTHS)
    assert len({tuple(text) for text in expected}) > len(expected) // 2, "samples must differ"
    assert len({len(text) for text in expected}) > 1, "some must meet the stop token"


@ON_TWO
@pytest.mark.parametrize(
    ("lora_dim", "tp_size", "merges"), [(0, 2, "auto"), (2, 2, "true"), (2, 2, "false"), (0, 1, "auto")]
)
def test_captured_graphs_outlive_updates(lora_dim, tp_size, merges, model_folder, tiny_engine):
    """Three steps capture once: slices stay where graphs read them, and a GPU's texts are a CPU's."""

    def run() -> Iterator[list[list[int]]]:
        engine = tiny_engine(folder, 3, lora_dim)
        with hybrid_engine(engine, inference_tp_size=tp_size, merge_adapters=merges) as hybrid:
            for _ in range(3):
                yield sample(hybrid, stop=-1)
                train_once(engine)

    folder, captures = model_folder("llama"), []
    expected = list(run())
    with pretended_gpu() as gpu:
        for texts, wanted in zip(run(), expected, strict=True):
            captures.append(sum(event.name == "torch.cuda.graph" for event in gpu.waits))
            gpu.clear()
            assert texts == wanted
    assert captures[0] > 0 == captures[1] == captures[2]
    assert expected[0] != expected[1] != expected[2], "an update must be seen"
