"""Which algorithm a flag names, what it does with the other flags, and what its file may import.

A4 and the like in a docstring are rows of the seeds.
"""

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

from step3_ppo.algorithms import ALGORITHMS, Algorithm, fill_defaults, find_algorithm, unused_flags
from step3_ppo.arguments import PPOArguments

NAMES = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline")


def test_the_empty_flags_get_what_the_algorithm_usually_does():
    filled = {}
    for name in NAMES:
        args = fill_defaults(PPOArguments(), ALGORITHMS[name])
        filled[name] = (args.kl_in, args.kl_estimator, args.adv_norm, args.loss_aggregation)
    assert filled == {
        "ppo": ("reward", "k1", "batch", "token"),
        "grpo": ("loss", "k3", "none", "sequence"),
        "dr_grpo": ("loss", "k3", "none", "constant"),
        "rloo": ("reward", "k1", "none", "token"),
        "reinforce++": ("reward", "k1", "batch", "token"),
        "reinforce++-baseline": ("reward", "k1", "batch", "token"),
    }
    chosen = {"kl_in": "loss", "kl_estimator": "k2", "adv_norm": "group", "loss_aggregation": "token"}
    args = fill_defaults(dataclasses.replace(PPOArguments(), **chosen), ALGORITHMS["ppo"])
    assert {name: getattr(args, name) for name in chosen} == chosen
    in_loss = dataclasses.replace(PPOArguments(), kl_in="loss")
    assert fill_defaults(in_loss, ALGORITHMS["ppo"]).kl_estimator == "k3"
    assert fill_defaults(args, ALGORITHMS["grpo"]) == args


def test_who_needs_a_critic_and_who_a_group():
    assert [n for n in NAMES if ALGORITHMS[n].needs_critic] == ["ppo"]
    needs_group = [n for n in NAMES if ALGORITHMS[n].needs_group]
    assert needs_group == ["grpo", "dr_grpo", "rloo", "reinforce++-baseline"]
    assert set(NAMES) <= set(ALGORITHMS)


def test_an_algorithm_is_found_by_name_or_imported(tmp_path, monkeypatch):
    """A4: the file that defines the algorithm."""
    assert find_algorithm("grpo") is ALGORITHMS["grpo"]
    (tmp_path / "my_algorithms_of_a_test.py").write_text(
        "from step3_ppo.algorithms import register_algorithm\n\n\n"
        "def plain(batch, args, kl_coef):\n    return batch\n\n\n"
        "@register_algorithm('of a test', needs_group=True)\n"
        "def decorated(batch, args, kl_coef):\n    return batch\n\n\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(ALGORITHMS)
    try:
        plain = find_algorithm("my_algorithms_of_a_test:plain")
        decorated = find_algorithm("my_algorithms_of_a_test:decorated")
        experience = object()
        assert plain == Algorithm("my_algorithms_of_a_test:plain", plain.add_advantages)
        assert plain.add_advantages(experience, PPOArguments(), 0.1) is experience
        assert decorated is find_algorithm("of a test") and decorated.needs_group
        with pytest.raises(ValueError, match="--algorithm .*:plane: .* has no plane; did you mean plain"):
            find_algorithm("my_algorithms_of_a_test:plane")
        with pytest.raises(ValueError, match="number is no function"):
            find_algorithm("my_algorithms_of_a_test:number")
    finally:
        ALGORITHMS.clear()
        ALGORITHMS.update(before)
        sys.modules.pop("my_algorithms_of_a_test", None)


def test_an_algorithm_that_is_not_found_is_named():
    with pytest.raises(ValueError, match=r"--algorithm gropo is unknown; did you mean grpo\? \(known: "):
        find_algorithm("gropo")
    with pytest.raises(ValueError, match="--algorithm no_such_module_at_all:f: .*PYTHONPATH"):
        find_algorithm("no_such_module_at_all:f")


@pytest.mark.parametrize("name", NAMES)
def test_flags_that_an_algorithm_does_not_read(name):
    critic = {"critic_learning_rate", "critic_lora_dim", "value_clip_range", "value_norm", "gae_lambda"}
    given = critic | {"gamma", "kl_coef", "num_samples_per_prompt", "critic_model_name_or_path"}
    given |= {"critic_zero_stage", "offload_reward_model", "truncated"}
    expected = set() if name == "ppo" else critic
    expected |= {"gamma"} if name in ("grpo", "dr_grpo", "rloo") else set()
    assert unused_flags(ALGORITHMS[name], given) == sorted(expected)
    assert unused_flags(ALGORITHMS[name], {"kl_coef"}) == []
    # The critic's model scores, unless --reward says what does.
    both = {"critic_model_name_or_path", "reward"}
    assert unused_flags(ALGORITHMS[name], both) == ([] if name == "ppo" else ["critic_model_name_or_path"])


def test_every_ignored_flag_is_one():
    flags = {field.name for field in dataclasses.fields(PPOArguments)}
    assert all(flags.issuperset(algorithm.ignores) for algorithm in ALGORITHMS.values())


def test_no_algorithm_imports_an_engine():
    """A1, A4: an algorithm is a function of a page, over tensors."""
    tree = ast.parse(Path(sys.modules[ALGORITHMS["ppo"].add_advantages.__module__].__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    engines = ("deepspeed", "common.engine", "common.generation", "step3_ppo.ro", "step3_ppo.ppo_losses")
    assert [n for n in names if n.startswith(engines)] == ["step3_ppo.rollout_batch"]
