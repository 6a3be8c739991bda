"""Step 2 under --loss dpo, ipo and kto: a chat model from pairs or rated answers, on one rank and on two, and
the loss before it learns.
"""

import math

import pytest
from program_runs import largest_difference, read_curve, read_metrics, read_weights, run_here
from tiny_inputs import step_flags
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def flags(tiny, tmp_path):
    more = {"loss": "dpo", "data_split": "0,1,0", "max_seq_len": 64, "eval_fraction": 0.2}
    more |= {"max_train_steps": 6, "num_train_epochs": 9, "learning_rate": 3e-3}
    return step_flags(tiny, 2, **more, output_dir=tmp_path / "output")


@pytest.mark.parametrize("more", [{}, {"packed": True, "lora_dim": 4, "lora_learning_rate": 3e-2}], ids=str)
def test_pairs_teach_a_chat_model(flags, tmp_path, capsys, lone_process, no_pictures, more):
    run_here(2, flags | more)
    output = tmp_path / "output"
    losses = read_curve(output, "dpo/loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and losses[-1] < 0.6
    first, *_, last = read_metrics(output, "dpo/margin")
    assert abs(first["dpo/margin"]) < 1e-4 and last["dpo/margin"] > 0.1 and last["dpo/accuracy"] > 0.5
    at_first, *_, at_last = read_metrics(output, "dpo/eval_loss")
    assert at_first["dpo/eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert "dpo/eval_margin" in at_last
    model = AutoModelForCausalLM.from_pretrained(output / "export")
    ids = AutoTokenizer.from_pretrained(output / "export")("the quick", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()


def test_more_pairs_than_were_asked_about(flags, tmp_path, capsys, lone_process, no_pictures):
    run_here(2, flags | {"max_train_steps": 3})
    with pytest.raises(SystemExit) as left:
        run_here(2, flags | {"max_train_steps": 5})
    assert left.value.code == 2
    assert (
        "--max_train_steps 5, --num_train_epochs 9: 8 more rows need the reference's"
        in capsys.readouterr().err
    )
    assert len(read_curve(tmp_path / "output", "dpo/loss")) == 3


def test_ipo_begins_at_its_target(flags, tmp_path, capsys, lone_process, no_pictures):
    run_here(2, flags | {"loss": "ipo", "beta": 0.5})
    losses = read_curve(tmp_path / "output", "dpo/loss")
    assert losses[0] == pytest.approx(1.0, abs=1e-4) and losses[-1] < 0.9  # (0 - 1 / (2 * 0.5))^2
    assert read_metrics(tmp_path / "output", "dpo/margin")[-1]["dpo/margin"] > 0.02


@pytest.mark.parametrize("more", [{}, {"packed": True, "lora_dim": 4, "lora_learning_rate": 3e-2}], ids=str)
def test_rated_answers_teach_a_chat_model(flags, tmp_path, capsys, lone_process, no_pictures, more):
    run_here(2, flags | {"loss": "kto", "undesirable_weight": 3.0} | more)
    output = tmp_path / "output"
    curves = {name: read_curve(output, f"kto/{name}") for name in ("loss", "kl", "desirable_reward")}
    bad = read_curve(output, "kto/undesirable_reward")
    # Every gain is 0 before anything is learned: half of the weights of the batch's answers, 1 and 3.
    num_bad = curves["loss"][0] * 4 - 2  # of 4 answers
    assert num_bad == pytest.approx(round(num_bad), abs=1e-3) and 0 <= round(num_bad) <= 4
    assert curves["kl"][0] == pytest.approx(0, abs=1e-4) and curves["desirable_reward"][-1] > bad[-1] + 0.05
    at_first, *_, at_last = read_metrics(output, "kto/eval_loss")
    assert at_last["kto/eval_loss"] < at_first["kto/eval_loss"] and at_last["kto/eval_accuracy"] > 0.5
    assert AutoModelForCausalLM.from_pretrained(output / "export")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_two_ranks_learn_the_same(flags, forks, tmp_path, lone_process, no_pictures, loss):
    # Of each evaluation four rows: two batches of two, or two of one on each of two ranks.
    flags = flags | {"loss": loss, "per_device_eval_batch_size": 2, "eval_iters": 2}
    run_here(2, flags)
    for stage in (0, 3):
        folder = tmp_path / f"two{stage}"
        more = {"output_dir": folder, "zero_stage": stage, "per_device_train_batch_size": 2}
        more["per_device_eval_batch_size"] = 1
        done = forks.run(2, flags | more, ranks=2)
        assert done.codes == [0, 0], done.text()
        mine, expected = (read_weights(f / "export") for f in (folder, tmp_path / "output"))
        assert largest_difference(mine, expected) < 1e-4
        for name in (f"{loss}/loss", f"{loss}/eval_loss"):
            losses = read_curve(tmp_path / "output", name)
            assert read_curve(folder, name) == pytest.approx(losses, abs=1e-5)
