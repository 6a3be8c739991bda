"""Roles of one base: what they hold, that it stays as it is, what keeps them apart. Saved adapters."""

import json
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from rollout_batches import make_rollout_batch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.engine.engine_step import LossTerm, compute_gradients, take_steps
from common.flags.args import Problems
from common.models.loading import ModelOptions, load_causal_lm, plain_model
from common.models.lora import LoraOptions, add_lora, trained_weights
from common.models.model_inputs import build_model_inputs
from common.models.saved_adapters import base_of
from common.models.value_model import has_saved_head, load_value_model
from common.programs.training_loop import saved_model
from common.runs.export import save_adapter
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_roles import RoleLoader, build_role_specs, build_roles, describe_bases, fill_ranks
from step3_ppo.rewards.reward_specs import parse_rewards
from step3_ppo.roles import Roles

RANK = 3
ROLES = ("actor", "critic", "reward")


@pytest.fixture(scope="module")
def adapters_of(tiny_model_folder, tiny_tokenizer, tmp_path_factory) -> Callable[[str], Path]:
    """A folder with an adapter for each role, all of one base of the family and no two alike."""
    return cache(
        lambda family: save_adapters(
            tmp_path_factory.mktemp("adapters"), tiny_model_folder(family), tiny_tokenizer
        )
    )


@pytest.fixture(scope="module")
def adapters(adapters_of) -> Path:
    return adapters_of("llama")


def save_adapters(folder: Path, base: str, tokenizer) -> Path:
    """Save an adapter for each role; those of experts reach these too."""
    for seed, role in enumerate(ROLES):
        options, lora = ModelOptions(base, dropout=0.0), LoraOptions(RANK, 2.0, module_name=".")
        if role == "actor":
            model = add_lora(load_causal_lm(options, 320), lora, seed)
        else:
            pooling = "mean" if role == "reward" else ""
            model = load_value_model(options, 320, lora, seed=seed, pooling=pooling).classifier
        torch.manual_seed(seed)
        for weight in trained_weights(model).values():
            if weight.lora_b is not None:
                nn.init.normal_(weight.lora_b, std=0.2)
        save_adapter(folder / role, model, tokenizer, {})
    return folder


def copy_of_its_own(adapter: Path, folder: Path) -> Path:
    """Return a copy of an adapter whose base is a copy, too."""
    shutil.copytree(base_of(str(adapter)), folder / "base")
    shutil.copytree(adapter, folder / "adapter")
    file = folder / "adapter/adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": str(folder / "base")}
    file.write_text(json.dumps(config))
    return folder / "adapter"


def flags_of(folders: dict[str, Path | str], **more) -> PPOArguments:
    args = PPOArguments(
        actor_model_name_or_path=str(folders["actor"]),
        critic_model_name_or_path=str(folders["critic"]),
        reward=[f"model:{folders['reward']}"],
        dtype="fp32",
        lr_scheduler_type="constant",
        actor_lora_learning_rate=1e-2,
        critic_lora_learning_rate=1e-2,
        **more,
    )
    problems = Problems()
    fill_ranks(args, problems)
    assert not problems.messages
    return args


def build(folders: dict[str, Path | str], tokenizer) -> Roles:
    args = flags_of(folders)
    return build_roles(args, tokenizer, parse_rewards(args.reward), 9, has_critic=True)


def modules_of(roles: Roles) -> list[nn.Module]:
    return [roles.actor.model.module, roles.critic.model.module, roles.rewards["model"].model]


def count_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of parameters, each storage once."""
    storages = [p.untyped_storage() for module in modules for p in module.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train_some(roles: Roles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train actor and critic; return what each role says of a batch then."""
    batch = make_rollout_batch([0, 1], [3, 2], [4, 2])

    def policy_sums(batch):
        return -roles.actor.compute_logprobs(batch)[0].sum(), {}

    def value_sums(batch):
        return (roles.critic.compute_values(batch)[0] - 1).square().sum(), {}

    for _ in range(3):
        for role, sums in ((roles.actor, policy_sums), (roles.critic, value_sums)):
            role.model.train()
            take_steps([compute_gradients(role.model, [LossTerm("x", [batch], sums, lambda batch: 6.0)])])
    said = [role.score([batch])[0] for role in (roles.actor, roles.reference, roles.rewards["model"])]
    return *said, roles.critic.score([batch])[0][0]


@pytest.mark.usefixtures("process_group")
def test_each_of_several_reward_models_has_its_own_weights_and_closing(adapters, tiny_tokenizer, monkeypatch):
    closings = {str(adapters / "reward"): [5], str(adapters / "critic"): [6, 7]}
    monkeypatch.setattr("step3_ppo.build_roles.closing_of", lambda path, template: closings[path])
    batch = make_rollout_batch([0, 1], [3, 2], [4, 2])

    def score(*names):
        args = flags_of({role: adapters / role for role in ROLES})
        specs = parse_rewards([f"model:{adapters / name}" for name in names])
        roles = build_roles(args, tiny_tokenizer, specs, 9, has_critic=False, template="a template")
        return [reward.score([batch])[0] for reward in roles.rewards.values()]

    found, alone = score("reward", "critic"), [*score("reward"), *score("critic")]
    for mine, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=0)
    assert (found[0] - found[1]).abs().min() > 1e-3


@pytest.mark.usefixtures("process_group")
def test_the_actors_schedule_has_its_steps_on_text_too(adapters, tiny_tokenizer, monkeypatch):
    lasting, load_engine = [], RoleLoader.load_engine
    monkeypatch.setattr(
        RoleLoader, "load_engine", lambda *given: lasting.append(given[-1]) or load_engine(*given)
    )
    for more in ({}, {"unsup_step": "joint"}, {"unsup_step": "own"}):
        text = {"unsupervised_dataset_name": "x"} if more else {}
        args = flags_of({role: adapters / role for role in ROLES}, **text, **more)
        build_roles(args, tiny_tokenizer, parse_rewards(args.reward), 9, has_critic=True)
    assert lasting == [9, 9, 9, 9, 18, 9], "actor and critic"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_base_is_held_once_and_says_what_copies_say(family, adapters_of, tiny_tokenizer, tmp_path):
    adapters = adapters_of(family)
    apart = {role: copy_of_its_own(adapters / role, tmp_path / role) for role in ROLES}
    shared, separate = (build(f, tiny_tokenizer) for f in ({r: adapters / r for r in ROLES}, apart))
    base = AutoModelForCausalLM.from_pretrained(base_of(str(adapters / "actor")))
    size = base.config.hidden_size
    own = 4 * sum(p.numel() for n, p in shared.actor.model.module.named_parameters() if ".lora_" in n)
    whole, backbone, head = 4 * base.num_parameters(), 4 * base.model.num_parameters(), 4 * size
    assert count_bytes(modules_of(shared)) == whole + 3 * own + 2 * head
    assert count_bytes(modules_of(separate)) == whole + 2 * backbone + 3 * own + 2 * head
    found, expected = train_some(shared), train_some(separate)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    assert (found[0] - found[1]).abs().max() > 0.1, "the actor has learned nothing"
    frozen = trained_weights(saved_model(shared.critic.model.module))
    for name, parameter in base.named_parameters():
        if name.startswith("model."):
            assert frozen[name].parameter.equal(parameter), f"{name} of the base was written to"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_each_role_begins_with_its_own_adapter_and_head(family, adapters_of, tiny_tokenizer):
    """As PEFT itself has them; the reference stays there while the actor learns."""
    adapters = adapters_of(family)
    roles = build({role: adapters / role for role in ROLES}, tiny_tokenizer)
    batch = make_rollout_batch([0, 1], [3, 2], [4, 2])
    assert [module.pooling for module in modules_of(roles)[1:]] == ["last", "mean"]
    (before,) = roles.reference.score([batch])
    assert before.equal(roles.actor.score([batch])[0])
    ids = torch.arange(1, 9)
    inputs = build_model_inputs(ids, torch.tensor([8]), is_packed=False)
    for role, module in zip(ROLES, modules_of(roles), strict=True):
        auto_class = AutoModelForCausalLM if role == "actor" else AutoModelForSequenceClassification
        plain = auto_class.from_pretrained(base_of(str(adapters / role)), num_labels=1)
        theirs = peft.PeftModel.from_pretrained(plain.eval(), adapters / role)
        with torch.no_grad():
            if role == "actor":
                mine = plain_model(module.eval().causal_lm)(ids[None]).logits
            else:
                plain.config.pad_token_id = 0  # in no row
                mine = module.eval()(inputs, inputs.last_slots)[:, None]
            torch.testing.assert_close(mine, theirs(ids[None]).logits)
    _, reference, _, _ = train_some(roles)
    assert reference.equal(before)


def test_an_adapter_of_others_is_read_as_peft_reads_it(tiny_model_folder, tmp_path):
    """rsLoRA, a rank of its own for some layers, and the head that PEFT adds for a classifier."""
    base = tiny_model_folder("gpt2")
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    config = peft.LoraConfig(
        r=4, lora_alpha=3, target_modules="all-linear", rank_pattern={"c_proj": 2}, use_rslora=True,
        lora_dropout=0.5, task_type="SEQ_CLS",
    )  # fmt: skip
    theirs = peft.get_peft_model(plain, config).eval()
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name or "score" in name:
            nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    assert has_saved_head(str(tmp_path)) and not has_saved_head(base)
    options = ModelOptions(base_of(str(tmp_path)), dropout=0.0)
    model = load_value_model(options, 320, LoraOptions(folder=str(tmp_path))).train()
    ids = torch.arange(1, 9)
    inputs = build_model_inputs(ids, torch.tensor([8]), is_packed=False)
    torch.testing.assert_close(model(inputs, inputs.last_slots)[:, None], theirs(ids[None]).logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "with use_dora, which is not supported here; merge it into its base"),
        ({"lora_bias": True, "use_dora": True}, "with use_dora, lora_bias, which is not supported"),
        ({"r": 4}, "of another size"),
        ({"target_modules": ["nothing"]}, "the adapter cannot be loaded: Target modules"),
        ({"peft_type": "IA3"}, "of type IA3; only LORA"),
        ({}, "1 weights are something else"),
    ],
)
def test_an_adapter_that_a_role_cannot_have_is_named(change, words, adapters, tmp_path):
    """The last is a reward model's, with its head, for an actor."""
    folder = shutil.copytree(adapters / ("actor" if change else "reward"), tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    model = load_causal_lm(ModelOptions(base_of(str(adapters / "actor"))), 320)
    with pytest.raises(ValueError, match=words) as error:
        add_lora(model, LoraOptions(folder=str(folder)))
    assert str(folder) in str(error.value)


# ---- which roles share


def groups(args: PPOArguments, *, has_critic: bool = True) -> tuple[list[list[str]], list[str], list[str]]:
    """Return the labels of roles with a base, those that share one together; the lines, and the problems."""
    specs = build_role_specs(args, parse_rewards(args.reward), has_critic=has_critic)
    problems = Problems()
    lines = describe_bases(args, specs, problems)
    by_base = {}
    for spec in (spec for spec in specs if spec.base):
        by_base.setdefault(spec.base, []).append(spec.label)
    return list(by_base.values()), lines, problems.messages


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [["actor", "critic", "reward model"]]),
        ({"only_optimize_lora": False}, [["reward model"]]),
        ({"actor_zero_stage": 3, "critic_zero_stage": 3}, [["actor", "critic", "reward model"]]),
        ({"actor_zero_stage": 3}, [["actor"], ["critic", "reward model"]]),
        ({"actor_zero_stage": 2, "critic_zero_stage": 1}, [["actor", "critic", "reward model"]]),
        ({"offload_reward_model": True}, [["actor", "critic"], ["reward model"]]),
        ({"offload": "optimizer", "actor_zero_stage": 2}, [["actor", "critic", "reward model"]]),
    ],
)
def test_roles_share_what_is_frozen_and_held_alike(more, expected, adapters):
    folders = {role: adapters / role for role in ROLES}
    by_place, lines, problems = groups(flags_of(folders, **more))
    assert by_place == expected and bool(problems) == (len(expected) > 1)
    if not problems and len(expected[0]) > 1:
        base = Path(base_of(str(adapters / "actor"))).resolve()
        assert lines == [f"one copy of {base} in memory serves actor, reference, critic, reward model"]
    for problem in problems:
        assert "--actor_zero_stage 3" in problem or "--offload_reward_model" in problem


def test_build_role_specs_gives_a_frozen_model_the_stage_of_a_trained_one(adapters):
    """The reference goes by the actor, a reward model by the critic."""
    args = flags_of({role: adapters / role for role in ROLES}, actor_zero_stage=2, critic_zero_stage=1)
    specs = build_role_specs(args, parse_rewards(args.reward), has_critic=True)
    assert [spec.flags.zero_stage for spec in specs] == [2, 2, 1, 1]


def test_shards_are_shared_where_the_cpu_keeps_them_for_all(adapters):
    stage_3 = {"actor_zero_stage": 3, "critic_zero_stage": 3, "offload": "all"}
    folders = {role: adapters / role for role in ROLES}
    assert len(groups(flags_of(folders, **stage_3, offload_reward_model=True))[0]) == 1
    by_place, _, problems = groups(flags_of(folders, **stage_3))
    assert by_place == [["actor", "critic"], ["reward model"]] and "--offload all" in problems[0]
    assert len(groups(flags_of(folders, **stage_3, critic_offload="none"))[2]) == 1


def test_models_of_one_folder_share_it_as_far_as_they_train_adapters_alone(tiny_model_folder, reward_export):
    """And where they cannot, each holds its own, as ever: that is said, and not refused."""
    base = tiny_model_folder("llama")
    folders = {"actor": base, "critic": f"{base}/", "reward": reward_export}
    assert groups(flags_of(folders, actor_lora_dim=2))[0] == [["actor"], ["reward model"]]
    lora = {"actor_lora_dim": 2, "critic_lora_dim": 2}
    assert groups(flags_of(folders, **lora))[0] == [["actor", "critic"], ["reward model"]]
    assert groups(flags_of(folders, **lora), has_critic=False)[0] == [["actor"], ["reward model"]]
    folders["critic"] = reward_export
    assert groups(flags_of(folders, critic_lora_dim=2))[0] == [["critic", "reward model"]]
    lines, problems = groups(flags_of(folders, critic_lora_dim=2, offload_reward_model=True))[1:]
    assert "is held twice, as the base of critic; of reward model" in lines[0] and not problems


def test_the_rank_is_the_adapters(adapters):
    args = flags_of({role: adapters / role for role in ROLES}, actor_lora_dim=RANK)
    assert (args.actor_lora_dim, args.critic_lora_dim) == (RANK, RANK)
    args.critic_lora_dim, problems = 8, Problems()
    fill_ranks(args, problems)
    assert len(problems.messages) == 1 and "--critic_lora_dim 8" in problems.messages[0]


def test_a_frozen_role_has_the_flags_of_its_model_and_nothing_that_only_training_needs():
    args = flags_of(
        {"actor": "a", "critic": "c", "reward": "r"}, critic_lora_dim=2, critic_gradient_checkpointing=True,
        critic_zero_stage=3, offload="all", teacher_model_name_or_path="t",
    )  # fmt: skip
    specs = build_role_specs(args, parse_rewards(args.reward), has_critic=True)
    assert [spec.path for spec in specs] == ["a", "t", "c", "r"]
    assert [spec.is_trained for spec in specs] == [True, False, True, False]
    flags = [(s.flags.lora_dim, s.flags.gradient_checkpointing, s.flags.offload) for s in specs[2:]]
    assert flags == [(2, True, "all"), (0, False, "none")]
    assert all(spec.flags.zero_stage == 3 for spec in specs[2:]) and not specs[1].uses_actor
