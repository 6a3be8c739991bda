"""Updates whose responses are all masked make no step and are in no mean, however the run is spread."""

import pytest
from program_runs import largest_difference, read_curve, read_weights
from tiny_inputs import step_flags

pytestmark = pytest.mark.slow

NAMES = ("policy/entropy", "policy/grad_norm", "policy/learning_rate", "policy/num_updates", "value/loss")


def run(forks, tiny, output, *, ranks, **more):
    """A run whose two responses of an update are truncated, or not, whatever the number of ranks."""
    flags = {"data_split": "0,0,1", "output_dir": output, "dtype": "fp32", "max_train_steps": 3}
    flags |= {"truncated": "mask", "early_stop_kl": 100, "lr_scheduler_type": "linear", "save_interval": 0}
    flags |= {"per_device_generation_batch_size": 8 // ranks, "num_train_epochs": 100}
    flags |= {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "seed": 5}
    flags |= {"per_device_training_batch_size": 2 // ranks} | more
    done = forks.run(3, step_flags(tiny, 3, **flags), ranks=ranks)
    assert done.codes == [0] * ranks, done.text()
    return output


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_leave_out_the_same_updates(forks, tiny, tmp_path, stage):
    alone = run(forks, tiny, tmp_path / "alone", ranks=1)
    stages = {"actor_zero_stage": stage, "critic_zero_stage": stage}
    both = run(forks, tiny, tmp_path / "both", ranks=2, **stages)
    num_updates = read_curve(alone, "policy/num_updates")
    assert 0 < sum(num_updates) < 3 * 4, "some of four updates a step must be empty, and not all"
    for name in NAMES:
        assert read_curve(both, name) == pytest.approx(read_curve(alone, name), rel=1e-4), name
    assert largest_difference(*(read_weights(output / "export") for output in (alone, both))) < 1e-5


def test_masked_updates_are_in_no_mean(forks, tiny, tmp_path):
    """Nothing moves: new and old probabilities are the same, token for token."""
    more = {"actor_learning_rate": 0, "loss_aggregation": "constant"}
    output = run(forks, tiny, tmp_path / "output", ranks=1, **more)
    made = [number for number in read_curve(output, "policy/num_updates") if number]
    assert read_curve(output, "policy/ratio") == pytest.approx([1.0] * len(made), rel=1e-6)
    assert min(read_curve(output, "policy/entropy")) > 1.0


def test_an_update_of_half_masked_responses_accumulates(forks, tiny, tmp_path):
    """A micro-batch without tokens beside one that has some changes nothing but the count."""
    whole = run(forks, tiny, tmp_path / "whole", ranks=1)
    parts = {"per_device_training_batch_size": 1, "gradient_accumulation_steps": 2}
    cut = run(forks, tiny, tmp_path / "cut", ranks=1, **parts)
    for name in NAMES:
        assert read_curve(cut, name) == pytest.approx(read_curve(whole, name), rel=1e-4), name
