"""What a GPU would refuse, wait for or not capture, seen on a pretended one."""

import copy
import pickle
import threading

import pytest
import torch
from pretended_gpu import pretended_gpu
from rollout_batches import make_rollout_batch
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.data.collators import collate_pairs, collate_sft
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.models.policy_model import PolicyModel, compute_nll_sum
from common.models.value_model import ScoreHead, ValueModel
from step2_reward.answer_scores import compute_answer_logprobs, compute_pair_scores
from step2_reward.pair_trainer import compute_pair_losses
from step3_ppo.roles import Critic, Policy

# ---- the instrument -------------------------------------------------------------------------------------


def test_it_looks_like_a_gpu():
    with pretended_gpu() as gpu:
        a = torch.ones(3, device="cuda")
        b = torch.ones(3)
        assert a.device == (a + 1).device == a[:1].device == torch.device("cuda:0") and a.is_cuda
        assert b.device.type == "cpu" and (a * torch.tensor(2.0)).is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            a + b
        with pytest.raises(TypeError, match="numpy"):
            a.numpy()
        assert a.type() == "torch.cuda.FloatTensor" and copy.deepcopy(a).is_cuda and a.new_tensor([1]).is_cuda
        gpu.clear()
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda
        assert not gpu.waits and not gpu.copies
        module = torch.nn.Linear(3, 2).to("cuda")
        loss = module(a).sum()
        loss.backward()
        assert module.weight.grad.is_cuda and torch.zeros_like(module.weight).is_cuda
    assert not a.is_cuda


@pytest.mark.parametrize(
    "act",
    [
        lambda x: torch.zeros(()).add_(x.sum()),
        lambda x: torch.stack([x[0], torch.tensor(1.0)]),
        lambda x: torch.ones(8)[x.long()],
        lambda x: x.index_put_((torch.arange(2, device="cuda"),), torch.ones(2)),
        lambda x: setattr(torch.ones(8), "grad", x),
        lambda x: torch._fused_adamw_(
            [x],
            [x],
            [x],
            [x],
            [],
            [torch.ones(())],
            amsgrad=False,
            lr=1.0,
            beta1=0.5,
            beta2=0.5,
            weight_decay=0.0,
            eps=1.0,
            maximize=False,
        ),
        lambda x: x.to("cuda:1"),
        lambda x: torch.empty(2, device="meta").to("cuda"),
        lambda x: x.pin_memory(),
        lambda x: pickle.dumps(x),
        lambda x: torch.empty(2**30, device="cuda"),
        lambda x: x.to("cpu", non_blocking=True).sum(),
        lambda x: torch.empty(8, pin_memory=True).copy_(x, non_blocking=True).tolist(),
    ],
)
def test_what_a_gpu_refuses(act):
    with pretended_gpu(memory_gib=1) as gpu:
        x = torch.arange(8, dtype=torch.float32, device="cuda")
        with pytest.raises((RuntimeError, NotImplementedError)):
            act(x)
        assert gpu.allocated == 32


def test_what_cpp_makes_is_where_it_is_needed(tiny_model_folder):
    attend = torch.nn.functional.scaled_dot_product_attention
    with pretended_gpu():
        x = torch.ones(1, 2, 4, 8, device="cuda", requires_grad=True)
        attend(x, x, x, dropout_p=0.5, is_causal=True).sum().backward()
        assert x.grad.is_cuda
        y = torch.ones(1, 2, 4, 8)
        assert not attend(y, y, y, dropout_p=0.5, is_causal=True).is_cuda
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
        with pytest.raises(RuntimeError, match="same device"):
            model(torch.ones(1, 2, dtype=torch.int64, device="cuda"))


def test_a_copy_is_read_after_a_wait():
    with pretended_gpu() as gpu:
        x = torch.ones(8, device="cuda")
        gpu.clear()
        copied = x.to("cpu", non_blocking=True)
        assert not gpu.waits
        torch.cuda.current_stream().synchronize()
        assert copied.tolist() == [1.0] * 8 and len(gpu.waits) == 1


def test_a_stream_uses_what_another_made_after_a_wait():
    with pretended_gpu():
        main, side, source = torch.cuda.current_stream(), torch.cuda.Stream(), torch.ones(8).pin_memory()
        buffer = torch.empty(8, device="cuda")
        with torch.cuda.stream(side), pytest.raises(RuntimeError, match="another stream"):
            buffer.copy_(source, non_blocking=True)  # main may still read what had this memory before
        side.wait_stream(main)
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
            buffer.copy_(source, non_blocking=True)
            copied = side.record_event()
            summed, late = buffer.sum(), [source.to("cuda", non_blocking=True) for _ in range(2)]
        with pytest.raises(RuntimeError, match="another stream"):
            buffer + 1
        main.wait_event(copied)
        assert (buffer + 1).is_cuda
        with pytest.raises(RuntimeError, match="another stream"):
            summed + 1
        for wait, tensor in zip((side.synchronize, torch.cuda.synchronize), late, strict=True):
            with torch.cuda.stream(side):
                tensor = tensor + 1
            with pytest.raises(RuntimeError, match="another stream"):
                tensor + 1
            wait()
            assert (tensor + 1).is_cuda and (summed + 1).is_cuda


def test_a_thread_and_a_hook_are_on_it():
    with pretended_gpu():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda").is_cuda))
        thread.start()
        thread.join()
        x = torch.ones(2, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: found.append(grad.is_cuda and torch.ones(2, device=grad.device).is_cuda))
        y.sum().backward()
        z = torch.ones(2, requires_grad=True)
        z.to("cuda").sum().backward()
        assert found == [True, True] and x.grad.is_cuda and not z.grad.is_cuda


@pytest.mark.parametrize(
    ("act", "num_waits", "num_bytes"),
    [
        (lambda x: x.sum().item(), 1, 0),
        (lambda x: x.tolist(), 1, 32),
        (lambda x: x.tolist() and torch.cuda.synchronize(), 1, 32),
        (lambda x: torch.cuda.synchronize(), 1, 0),
        (lambda x: bool(x.any()), 1, 0),
        (lambda x: x[x > 0], 1, 0),
        (lambda x: x.nonzero(), 1, 0),
        (lambda x: x.cpu(), 1, 32),
        (lambda x: x[torch.tensor([0, 1])], 1, 16),
        (lambda x: torch.tensor([1.0, 2.0], device="cuda"), 1, 8),
        (lambda x: torch.ones(4).to("cuda"), 1, 16),
        (lambda x: torch.ones(4).pin_memory().to("cuda", non_blocking=True), 0, 16),
        (lambda x: torch.ones(4).to("cuda", non_blocking=True), 1, 16),
        (lambda x: x.copy_(torch.ones(8)), 1, 32),
        (lambda x: x.__setitem__(x > 0, 0.0), 0, 0),
        (lambda x: x.masked_fill_(x > 0, 1.0).where(x > 0, 0.0).clamp(0, 1), 0, 0),
        (lambda x: x.repeat_interleave(torch.ones(8, dtype=torch.int64, device="cuda"), output_size=8), 0, 0),
        (lambda x: x.repeat_interleave(torch.ones(8, dtype=torch.int64, device="cuda")), 1, 0),
    ],
)
def test_waits_and_copies_are_seen(act, num_waits, num_bytes):
    with pretended_gpu() as gpu:
        x = torch.arange(8, dtype=torch.float32, device="cuda")
        gpu.clear()
        act(x)
    assert (len(gpu.waits), sum(copy.num_bytes for copy in gpu.copies)) == (num_waits, num_bytes)
    assert all(event.where.startswith("test_pretended_gpu.py:") for event in gpu.waits)


def test_a_graph_replays_what_it_captured():
    with pretended_gpu() as gpu:
        x, total = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
        factor, graph = 3, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.add_(torch.full((2,), 1.0, device="cuda") + x * factor)
        assert total.tolist() == [0.0, 0.0]  # nothing is done while it is captured
        factor = 5  # a number of Python is that of the capture
        x.fill_(2.0)  # a tensor's content is that of the replay
        graph.replay()
        graph.replay()
        assert total.tolist() == [14.0, 14.0] and len(gpu.graphs) == 1
        for forbidden in (lambda: x.sum().item(), lambda: torch.ones(2).to("cuda"), lambda: x[x > 0]):
            with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                forbidden()


def test_a_graph_does_not_keep_what_it_reads():
    with pretended_gpu():
        x, total = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.add_((x * 2).sqrt())
        graph.replay()
        del x
        with pytest.raises(RuntimeError, match="illegal memory access"):
            graph.replay()


# ---- losses ---------------------------------------------------------------------------------------------

ROWS = [
    {"input_ids": [1, 2, 3, 4], "loss_mask": [False, False, True, True], "row_id": "a"},
    {"input_ids": [1, 2, 3], "loss_mask": [False, True, True], "row_id": "b"},
]
STARTS = {"chosen_response_start": 2, "rejected_response_start": 2}
PAIRS = [
    {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5], "margin": 0.1, "row_id": "a"} | STARTS,
    {"chosen_ids": [1, 2, 7], "rejected_ids": [1, 2, 6, 3, 4], "margin": 0.2, "row_id": "b"} | STARTS,
]


def policy_of(device, family="llama"):
    torch.manual_seed(0)
    return PolicyModel(AutoModelForCausalLM.from_config(tiny_config(family, 64)), num_valid_tokens=60).to(
        device
    )


def ranker_of(device):
    config = tiny_config("llama", 64)
    config.num_labels = 1
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.score.__class__ = ScoreHead
    return ValueModel(classifier).to(device)


def pair_loss(kind):
    def compute(device):
        model, batch = ranker_of(device), collate_pairs(PAIRS)
        scores = compute_pair_scores(model, batch, with_values=kind == "token_wise")
        return model, compute_pair_losses(batch, scores, rank_loss=kind, use_margin=True).sum()

    return compute


def sft_loss(device):
    model = policy_of(device)
    return model, compute_nll_sum(model, collate_sft(ROWS))


def dpo_logprobs(device):
    model = policy_of(device)
    return model, compute_answer_logprobs(model, collate_pairs(PAIRS)).sum()


def rollout_logprobs(device):
    model = policy_of(device)
    batch = make_rollout_batch([0, 1, 2], [3, 5, 2], [4, 1, 5])
    logprobs, entropies = Policy(model, False).compute_logprobs(batch, with_entropy=True)
    return model, logprobs.sum() + entropies.sum()


def rollout_values(device):
    model = ranker_of(device)
    values, last = Critic(model, False).compute_values(make_rollout_batch([0, 1, 2], [3, 5, 2], [4, 1, 5]))
    return model, values.sum() + last.sum()


LOSSES = [
    sft_loss,
    dpo_logprobs,
    pair_loss("end_score"),
    pair_loss("token_wise"),
    rollout_logprobs,
    rollout_values,
]


@pytest.mark.parametrize("compute", LOSSES, ids=lambda f: f.__qualname__.split(".")[0])
def test_losses_and_gradients_are_the_cpus(compute):
    def run(device):
        model, loss = compute(device)
        loss.backward()
        return loss.detach().cpu(), {
            name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None
        }

    expected = run("cpu")
    with pretended_gpu():
        found = run("cuda")
    assert torch.equal(found[0], expected[0]) and found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())


# ---- generation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 5}, {"do_sample": False}], ids=str)
@pytest.mark.parametrize("family", ["bloom", "gemma2", "llama"])  # test_decode_graphs.py has all of them
def test_graphs_give_the_texts_of_the_cpu(family, options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, 64)).eval()
    ids = torch.randint(1, 60, (4, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[0, :2] = False
    sampling = SamplingOptions(max_new_tokens=6, stop_token_id=3, pad_token_id=0, **options)

    def run(model, device):
        inputs = [x.to(device) for x in (ids, mask, torch.arange(8))]
        generator = Generator(share_weights(model), num_slots=3)
        for _ in range(2):
            found = generator.generate(PromptBatch(*inputs), sampling)
        return found.response_ids.cpu(), generator

    expected, _ = run(model, "cpu")
    with pretended_gpu() as gpu:
        found, generator = run(model.to("cuda"), "cuda")
        assert torch.equal(found, expected)
        assert gpu.launches["a graph"] > 0
