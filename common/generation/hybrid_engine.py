"""Switch of the actor between training and generation: one set of weights, two layouts.

ZeRO 0-2 with one rank per replica: the inference module holds the trained weights themselves; nothing is
copied or sent. ZeRO 3, or `inference_tp_size` t > 1: each rank receives its slice of every weight, and frees
it after generation; while captured graphs read the slices, their memory is kept and refilled by the next
switch. LoRA: adapters are computed beside the weights, or merged with them into new tensors; the trained
weights are never modified.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from common.data.packed_batch import pad_sequences
from common.generation.decode import DecodeState, SamplingOptions
from common.generation.generate import (
    DEFAULT_SLOTS,
    Generation,
    Generator,
    PromptBatch,
    TurnCallback,
    collect_responses,
    continue_turns,
)
from common.generation.inference_module import InferenceModule, cut_module
from common.generation.resharding import Resharder, TPGroups, TPLayout
from common.generation.tp_plans import Cut, NoPlan, build_cuts
from common.models.loading import plain_model
from common.models.lora import TrainedWeight, trained_weights
from common.models.policy_model import language_model
from common.ranks import distributed, watchdog
from common.ranks.failures import is_out_of_memory
from common.ranks.zero3 import OptimizerStates, is_sharded, local_shard


@dataclass(frozen=True)
class HybridOptions:
    """Generation options of the actor, named like step 3's flags.

    Without `enable_hybrid_engine`: transformers' `generate` on gathered weights. `max_length`: capacity of a
    slot in tokens of prompt and response; 0: as needed by a call.
    """

    enable_hybrid_engine: bool = True
    inference_tp_size: int = 1
    inference_tp_groups: str = "strided"
    release_inference_cache: bool = False
    unpin_actor_parameters: bool = False
    tp_gather_partition_size: int = 8
    generation_slots: int = 0
    no_cuda_graphs: bool = False
    offload_states_for_generation: bool = False
    merge_adapters: str = "auto"
    max_length: int = 0

    @classmethod
    def of(cls, args: Any) -> Self:
        """Build the options from the flags."""
        given = {name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)}
        return cls(**given, max_length=args.max_prompt_seq_len + args.max_answer_seq_len)


def merges_adapters(choice: str, is_sharded: bool, tp_size: int) -> bool:
    """Whether --merge_adapters merges: `auto` does where a rank's slices of the weights are copies anyway."""
    return choice == "true" or (choice == "auto" and (is_sharded or tp_size > 1))


class HybridEngine:
    """A DeepSpeed engine that can also generate. All ranks must create and use it together."""

    def __init__(self, engine: Any, options: HybridOptions) -> None:
        self.engine, self.options = engine, options
        self._states: list[OptimizerStates] = []
        if options.offload_states_for_generation:
            self.offload_during_generation(engine)
        self.received_bytes = 0  # on this rank, in the last switch
        self.module = language_model(engine.module)
        self._weights = weights = trained_weights(self.module)
        self.is_sharded = any(is_sharded(w.parameter) for w in weights.values())
        is_enabled = options.enable_hybrid_engine
        self.gather_by_layer = is_enabled and options.unpin_actor_parameters and self.is_sharded
        if self.gather_by_layer:
            self._use_layout(1)
            self.inference_module: nn.Module = self.module
        else:
            self._build_inference_module(weights)
        self.generator: Generator | TransformersGenerator = TransformersGenerator(self.inference_module)
        if is_enabled:
            self.generator = Generator(
                self.inference_module,
                num_slots=options.generation_slots,
                max_length=options.max_length,
                agree_any=distributed.max_float if self.gather_by_layer else None,
                tp_group=self.groups.tp_group,
                use_cuda_graphs=not options.no_cuda_graphs,
            )

    def offload_during_generation(self, engine: Any) -> None:
        """Keep the optimizer states of this ZeRO engine, or of another one, on the CPU while this one
        generates.
        """
        self._states.append(OptimizerStates(engine))

    def _use_layout(self, tp_size: int) -> None:
        is_contiguous = self.options.inference_tp_groups == "contiguous"
        self.layout = TPLayout(distributed.world_size(), tp_size, distributed.rank(), is_contiguous)
        self.groups = TPGroups(self.layout)

    def _build_inference_module(self, weights: dict[str, TrainedWeight]) -> None:
        self._unmerged = {n: w for n, w in weights.items() if self._stays_unmerged(w)}
        self._describe_adapters()
        source = plain_model(self.module)
        self._inference = InferenceModule(source, distributed.device(), unmerged=self._unmerged)
        self.inference_module = module = self._inference.module
        self._cuts: dict[str, Cut] = {}
        tp_size = self.options.inference_tp_size if self.options.enable_hybrid_engine else 1
        try:
            self._cuts = build_cuts(module, tp_size)
        except NoPlan as reason:
            tp_size = 1
            if distributed.is_main():
                print(f"generating with --inference_tp_size 1: {reason}", flush=True)
        self._use_layout(tp_size)
        cut_module(module, self._cuts, self.layout.tp_rank, tp_size, self.groups.tp_group)
        layers_at_a_time = self.options.tp_gather_partition_size
        self._resharder = Resharder(
            weights, self._cuts, self.layout, self.groups, gather_partition_size=layers_at_a_time
        )

    def _stays_unmerged(self, weight: TrainedWeight) -> bool:
        """Whether a weight is attached as it is: packed in 4 bits, or with its adapter beside it."""
        merges = merges_adapters(self.options.merge_adapters, self.is_sharded, self.options.inference_tp_size)
        is_special = weight.packing is not None or weight.lora_a is not None
        return is_special and not merges and not weight.is_added_by_trainer

    def _describe_adapters(self) -> None:
        adapted = [name for name, weight in self._weights.items() if weight.lora_a is not None]
        beside = sum(name in self._unmerged for name in adapted)
        parts = {"beside their weights": beside, "merged into copies of their weights": len(adapted) - beside}
        for where, number in parts.items():
            if number:
                distributed.print_once(f"note: generation uses the adapters of {number} matrices {where}")

    @contextmanager
    def generation_mode(self) -> Iterator[nn.Module]:
        """Context that yields the inference module in eval mode; on exit, also by an exception, the state
        for training is restored.

        All ranks must enter it together; inside, only ranks of a tensor-parallel group must stay in step.
        """
        was_training = self.module.training
        if self.gather_by_layer:
            self.module.eval()
        try:
            with watchdog.phase("the switch to generation", clock="switch"):
                for states in self._states:
                    states.offload()
                if not self.gather_by_layer:
                    self._attach_weights()
            yield self.inference_module
        finally:
            with watchdog.phase("the switch to training", clock="switch"):
                if self.options.release_inference_cache:
                    self.generator.release()
                if not self.gather_by_layer:
                    self._inference.detach(keep_slices=self.generator.has_graphs)
                for states in self._states:
                    states.reload()
            self.module.train(was_training)

    def _attach_weights(self) -> None:
        size = self.options.tp_gather_partition_size
        cure = f"lower --tp_gather_partition_size {size}: fewer layers are then moved at a time"
        if size == 1:
            cure = (
                f"raise --inference_tp_size {self.layout.tp_size}: each rank then has less of the model; "
                "or use --unpin_actor_parameters, which gathers one layer at a time"
            )
        with named_out_of_memory(cure), torch.no_grad():
            for name, weight in self._resharder.load():
                self._attach(name, weight)
        self.received_bytes = self._resharder.received_bytes

    def _attach(self, name: str, weight: TrainedWeight) -> None:
        """Attach this rank's slice of a weight, with or without its adapter merged into a new tensor."""
        cut = self._cuts.get(name)
        tp_rank = self.layout.tp_rank

        def take(factor: torch.Tensor, dim: int) -> torch.Tensor:
            return cut.take(factor, tp_rank) if cut is not None and cut.dim == dim else factor

        weight = weight.cut_factors(take)
        trained = self._weights[name]
        if name not in self._unmerged:
            weight = TrainedWeight(weight.merged())
        self._inference.attach(
            name, weight.parameter, is_shared=_is_view(weight.parameter, trained.parameter)
        )
        if weight.lora_a is not None:
            is_shared = _is_view(weight.lora_a, trained.lora_a) and _is_view(weight.lora_b, trained.lora_b)
            self._inference.attach_adapter(name, weight, is_shared=is_shared)

    def release(self) -> None:
        """Free the memory kept between generations: keys, values, graphs and slices."""
        self.generator.release()
        if not self.gather_by_layer:
            self._inference.detach()

    def generate(
        self, batch: PromptBatch, options: SamplingOptions, *, on_turns: TurnCallback | None = None
    ) -> Generation:
        """This rank's responses, see `Generator.generate`; to be called in generation mode.

        Ranks that share a replica generate for all of them together; `on_turns` is called with this rank's
        responses only. Every rank must call this.
        """
        first = 0
        num_responses = len(batch.sample_ids)
        if self.layout.tp_size > 1:
            assert batch.limits is None, "limits per response are not sent to the ranks of a replica"
            mask = batch.prompt_mask.bool()
            flat = (batch.prompt_ids[mask], mask.sum(1), batch.sample_ids)
            token_ids, lengths, samples = map(self._gather, flat)
            prompts = pad_sequences(torch.cat(token_ids), torch.cat(lengths), on_left=True)
            batch = PromptBatch(*prompts, torch.cat(samples))
            first = sum(map(len, samples[: self.layout.tp_rank]))
            if on_turns:
                on_turns = self._shared(on_turns, range(first, first + num_responses))
        on_device = (tensor.to(distributed.device()) for tensor in batch[:3])
        num_slots = self.options.generation_slots or DEFAULT_SLOTS
        with named_out_of_memory(f"lower --generation_slots {num_slots}, the number of sequences at a time"):
            generation = self.generator.generate(PromptBatch(*on_device), options, on_turns=on_turns)
        return Generation(*(tensor[first : first + num_responses] for tensor in generation))

    def _shared(self, on_turns: TurnCallback, own: range) -> TurnCallback:
        """A callback for the whole replica: each of its ranks calls `on_turns` for its own samples."""

        def call_all_ranks(ended: list[tuple[int, list[int]]]) -> list[list[int] | None]:
            own_turns = [(sample, ids) for sample, ids in ended if sample in own]
            own_replies = on_turns([(sample - own.start, ids) for sample, ids in own_turns])
            replies = dict(zip([sample for sample, _ in own_turns], own_replies, strict=True))
            for rank_replies in distributed.gather_objects(replies, self.groups.tp_group):
                replies |= rank_replies or {}  # None: a rank of another replica
            return [replies[sample] for sample, _ in ended]

        return call_all_ranks

    def _gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The flat tensors of all ranks of the replica, on the CPU; all of these ranks must call this."""
        return distributed.all_to_all([flat.cpu()] * self.layout.tp_size, self.groups.tp_group)


def _is_view(tensor: torch.Tensor, trained: torch.Tensor) -> bool:
    """Whether a tensor is in the memory of this rank's part of a trained one."""
    return tensor.untyped_storage().data_ptr() == local_shard(trained).untyped_storage().data_ptr()


class TransformersGenerator:
    """Generates with transformers' own `generate` and our sampler: the baseline for comparisons.

    It samples the same texts as `Generator`, but needs whole weights, pads every prompt to the longest and
    decodes until the last response of the batch has ended.
    """

    has_graphs = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def release(self) -> None:
        """Do nothing: no memory is kept between calls."""

    @torch.no_grad()
    def generate(
        self, batch: PromptBatch, options: SamplingOptions, *, on_turns: TurnCallback | None = None
    ) -> Generation:
        """The responses of all samples, see `Generator.generate`."""
        assert batch.limits is None, "limits per response are not supported"
        ids = batch.prompt_ids.repeat_interleave(batch.num_samples, dim=0)
        mask = batch.prompt_mask.long().repeat_interleave(batch.num_samples, dim=0)
        sample_ids = batch.sample_ids
        state = DecodeState.build(len(sample_ids), options.max_new_tokens, ids.device)
        limits = torch.full_like(sample_ids, options.max_new_tokens)
        state.enter(0, mask.sum(1), limits, sample_ids, options.seed)
        running = set(range(len(sample_ids)))

        def choose_sampled(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Leave the sampled token as the only possible one."""
            state.sample(slice(None), scores, options)
            return torch.full_like(scores, -torch.inf).scatter_(1, state.last_ids.unsqueeze(1), 0.0)

        def have_ended(input_ids: torch.Tensor, scores: torch.Tensor, **more: Any) -> torch.Tensor:
            ended = running - set(state.is_live.nonzero()[:, 0].tolist())
            if on_turns and ended:
                ended -= continue_turns(state, {row: row for row in sorted(ended)}, on_turns)
            running.difference_update(ended)
            return ~state.is_live

        self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,  # the logits processor samples
            max_new_tokens=options.max_new_tokens,
            pad_token_id=options.pad_token_id,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([choose_sampled]),
            stopping_criteria=StoppingCriteriaList([have_ended]),
        )
        return collect_responses(state, options)


@contextmanager
def named_out_of_memory(cure: str) -> Iterator[None]:
    """Context that re-raises an out-of-memory error as a MemoryError that names the cure."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"no memory left to generate: {cure}") from error
