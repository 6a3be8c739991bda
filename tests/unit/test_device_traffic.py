"""How often the host waits for a GPU while it trains, on the pretended one: before it waits, it queues work
ahead, and the GPU is never idle.
"""

import pytest
import torch
from pretended_gpu import pretended_gpu
from tiny_configs import CONFIGS, tiny_config
from transformers import AutoModelForCausalLM

from benchmarks.bench_device_traffic import TINY, build_steps, text_rows
from common.data.collators import collate_sft
from common.data.packed_batch import to_device
from common.models import attention
from common.models.loading import set_dropout
from common.models.policy_model import PolicyModel, compute_nll_sum

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(autouse=True)
def our_attention() -> None:
    """What loading a model installs; these are made from a configuration."""
    attention.install()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "most"), [(1, 2), (2, 2), (3, 14)])  # with DeepSpeed's own of gathering
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_the_host_waits_twice_in_an_optimizer_step_and_never_before_its_last_pass(kind, stage, most):
    """Once for the numbers that say whether the step is made, once for the seconds that it took; DeepSpeed
    computes norms, looks for overflows and takes times by itself, and would wait for each.
    """
    steps = build_steps(kind, stage, **TINY)
    expected = {name: step(3) for name, step in steps.items()}
    with pretended_gpu() as gpu:
        for name, step in build_steps(kind, stage, **TINY).items():
            found = step(3)
            if isinstance(found, dict):
                assert found == expected[name]
            for _ in range(2):  # DeepSpeed begins to take times with the third step
                gpu.clear()
                step(3)
            assert len(gpu.waits) <= (1 if "scores" in name else most), gpu.waits
            ours = [copy for copy in gpu.copies if copy.where.startswith("packed_batch.py")]
            assert len(ours) <= 3 * 3, gpu.copies


# Models whose own code waits in every pass.
WAITING = {"falcon", "falcon_new", "gpt_neo"}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_training_pass_of_no_family_waits(family):
    """transformers would look at the positions whether a row holds several sequences."""
    torch.manual_seed(0)
    config = tiny_config(family, 64)
    set_dropout(config, 0.0)
    model = PolicyModel(AutoModelForCausalLM.from_config(config), num_valid_tokens=64).bfloat16()
    with pretended_gpu((9, 0)) as gpu:  # below Hopper, and in fp32, a mixture's product by expert waits
        model.to("cuda")
        gpu.clear()
        compute_nll_sum(model, collate_sft(text_rows(0))).backward()
    assert family in WAITING or not gpu.waits


def test_tensors_cross_in_one_block_that_nobody_waits_for():
    tensors = [torch.tensor([True, False, True]), torch.arange(3), torch.rand(2, 3).t(), torch.tensor(2.5)]
    tensors += [torch.zeros(0, 2), torch.tensor([1, 2], dtype=torch.uint8), torch.rand(3).double()]
    with pretended_gpu() as gpu:
        moved = to_device(tensors, "cuda")
        assert all(tensor.is_cuda for tensor in moved) and len(gpu.copies) == 1 and not gpu.waits
        assert [x.dtype for x in moved] == [x.dtype for x in tensors]
        assert all(torch.equal(x.cpu(), tensor) for x, tensor in zip(moved, tensors, strict=True))
        assert to_device([moved[1]], "cpu")[0].device.type == "cpu"
