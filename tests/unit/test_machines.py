"""Rates of machines: of data sheets by card, and of this machine in a file that is made, read and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import LLAMA_7B, single

from common.models.loading import DTYPES
from common.ranks.devices import DEVICES, kind_of
from tools import measured_machine, plan
from tools.machines import CARDS, machines_of_kind
from tools.measured_machine import file_of_measures, machines_here, read_measures

RATES = {"fp32": 1e11, "bf16": 2e11, "attention_fp32": 4e10, "attention_bf16": 5e10}
RATES |= {"memory": 1e10, "reads": 8e9, "launch_seconds": 5e-6, "near": 0.0}
MEASURE = "python -m tools.plan --measure"
SFT = ("--stage", "1", "--model_name_or_path", LLAMA_7B)


@pytest.fixture
def measures(tmp_path, monkeypatch) -> Path:
    """A cache folder of a user without measurements, and a machine that is measured in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("start", "stop"):  # of the group that other tests of this process share
        monkeypatch.setattr(plan.distributed, name, lambda: None)
    for kind in ("", "attention_"):
        of_dtype = {DTYPES[name]: RATES[kind + name] for name in ("fp32", "bf16")}
        monkeypatch.setattr(measured_machine, f"{kind or 'product_'}rate", of_dtype.__getitem__)
    for name in ("memory_rate", "read_rate", "launch_seconds"):
        key = "reads" if name == "read_rate" else name.removesuffix("_rate")
        monkeypatch.setattr(measured_machine, name, lambda key=key: RATES[key])
    return file_of_measures()


def written(path: Path, **changes: Any) -> Path:
    """The file of a measurement with some of its values changed; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return path


def output_of(capsys: pytest.CaptureFixture, *words: str) -> str:
    """What the program prints, whether or not the run fits."""
    try:
        plan.main(list(words))
    except SystemExit as stop:
        assert stop.code == 1
    return capsys.readouterr().out


def test_every_gpu_has_rates_and_a_cpu_has_none():
    assert set(CARDS) == set(DEVICES) - {"cpu"}
    assert machines_of_kind("cpu") is None


def test_a_cards_rates():
    machines = machines_of_kind("a100-80g")
    assert (machines.flops, machines.memory, machines.near) == (312e12, 2.039e12, 300e9)
    assert machines.arithmetic_share == pytest.approx(0.869 * 0.7)
    assert machines.reads == pytest.approx(2.039e12 * 0.82)
    assert machines_of_kind("t4-16g", "fp32").flops == 8.1e12
    assert machines_of_kind("t4-16g", "fp16").flops == 65e12


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A10", "a10-24g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA GeForce RTX 4090", "4090-24g"),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA Z1", None),
        ("h200", "h200"),
    ],
)
def test_the_kind_of_a_gpus_name(name, kind):
    assert kind_of(name) == kind


def test_a_measurement_is_written_and_read(measures, capsys):
    assert read_measures("cpu", 1) == ({}, f"this machine is not measured: {MEASURE}")
    plan.main(["--measure"])
    assert f"written to {measures}" in capsys.readouterr().out
    content, reason = read_measures("cpu", 1)
    assert reason == "" and RATES.items() <= content.items()
    assert content == json.loads(measures.read_text())
    machines = machines_here(content, "bf16")
    assert (machines.flops, machines.attention_share, machines.memory, machines.reads) == (
        2e11,
        0.25,
        1e10,
        8e9,
    )
    assert (machines.launch_seconds, machines.is_cpu, machines.arithmetic_share) == (5e-6, True, 1.0)
    assert machines.near == 32e9
    assert machines_here(content, "fp32").attention_share == 0.4
    linked = machines_here(content | {"near": 4e8}, "fp32")
    assert linked.near * linked.link_share == pytest.approx(4e8)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "reason"),
    [
        ({"version": 0}, 1, "version 0, not 1"),
        ({"machine": "other"}, 1, "of machine other, not "),
        ({"torch": "1.0"}, 1, "of torch 1.0, not "),
        ({"device": "NVIDIA H200"}, 1, "of device NVIDIA H200, not cpu"),
        ({}, 2, "of ranks 1, not 2"),
        ({"reads": None}, 1, "has no valid 'reads'"),
        ({"memory": -1.0}, 1, "has no valid 'memory'"),
        ({"date": None}, 1, "has no valid 'date'"),
        ({"threads": "all"}, 1, "has 'all' under 'threads'"),
        ({"bf16": "fast"}, 1, "has 'fast' under 'bf16'"),
    ],
)
def test_a_file_that_does_not_hold_is_named_and_ignored(measures, changes, num_ranks, reason):
    plan.main(["--measure"])
    written(measures, **changes)
    content, said = read_measures("cpu", num_ranks)
    cure = MEASURE if num_ranks == 1 else MEASURE.replace("python", "torchrun --nproc_per_node 2")
    assert content == {} and str(measures) in said and reason in said and said.endswith(f"ignored; {cure}")


def test_a_torn_file_is_named_and_ignored(measures):
    plan.main(["--measure"])
    measures.write_text(measures.read_text()[:-5])
    content, said = read_measures("cpu", 1)
    assert content == {} and f"{measures} cannot be read as JSON" in said and said.endswith(MEASURE)


def test_a_folder_that_cannot_be_written_is_an_error(measures):
    measures.parent.parent.joinpath("triptych").write_text("")
    with pytest.raises(SystemExit) as stop:
        plan.main(["--measure"])
    assert str(stop.value).startswith("error: the rates were not written: ")


def test_other_flags_still_need_a_stage(capsys):
    with pytest.raises(SystemExit) as stop:
        plan.main(["--gpu", "h200"])
    assert stop.value.code == 2 and "--stage" in capsys.readouterr().err


def test_a_plan_prints_seconds_and_hours(capsys):
    text = output_of(capsys, *SFT, "--gpu", "a100-80g", "--num_rows", "52000")
    assert "estimated seconds of a step" in text and "\nstep  " in text
    assert "rates: data sheets" in text and "an estimate: " in text
    line = next(line for line in text.splitlines() if line.startswith("the run takes "))
    step = float(next(line for line in text.splitlines() if line.startswith("step  ")).split()[1])
    assert float(line.split()[3]) == pytest.approx(52000 / 16 * step / 3600, rel=0.01)
    assert "the run takes" not in output_of(capsys, *SFT, "--gpu", "a100-80g")


def test_a_cpus_seconds_need_a_measurement(measures, capsys):
    assert f"no seconds: this machine is not measured: {MEASURE}" in output_of(capsys, *SFT, "--gpu", "cpu")
    plan.main(["--measure"])
    text = output_of(capsys, *SFT, "--gpu", "cpu")
    threads = torch.get_num_threads()
    assert "rates: this machine as measured on 20" in text and f"threads per rank: {threads}" in text


def test_a_gpu_that_is_here_has_its_measured_rates_or_those_of_its_kind(measures):
    run = single(LLAMA_7B, "--gpu", "h200")
    run.args.gpu = "NVIDIA H200"
    machines, source = plan.find_machines(run)
    assert machines == machines_of_kind("h200") and "; this machine is not measured: " in source
    plan.main(["--measure"])
    assert f"; {measures} is of device cpu, not NVIDIA H200" in plan.find_machines(run)[1]
    written(measures, device="NVIDIA H200")
    assert read_measures("cpu", 1)[1].startswith(f"{measures} is of device NVIDIA H200, not cpu")
    machines, source = plan.find_machines(run)
    assert machines.flops == 2e11 and not machines.is_cpu and source.startswith("this machine as measured on")
    run.args.gpu = "NVIDIA Z1"
    assert plan.find_machines(run)[0] is None and plan.time_lines(run)[0].startswith("no seconds: ")


# ---- measuring ------------------------------------------------------------------------------------------


def test_measured_rates_count_what_is_done(monkeypatch):
    calls = []

    def two_seconds(run: Any) -> float:
        calls.append(run())
        return 2.0

    monkeypatch.setattr(measured_machine, "seconds_of", two_seconds)
    products = 6 * 1024 * (576 * 576 + 2 * 576 * 1536)
    assert measured_machine.product_rate(torch.float32) == products / 2
    # scores and weighted values of half the pairs: 2 x 2 x 512^2 / 2 x 64 of 9 heads, and twice that backward
    assert measured_machine.attention_rate(torch.float32) == 3 * 2 * 512**2 * 64 * 9 / 2
    assert measured_machine.memory_rate() == (3 + 3 + 2) * 4 * 2**22 / 2
    assert measured_machine.read_rate() == 16 * 4 * 576 * 4 * 576 * 4 / 4 / 2
    assert len(calls) == 4


def test_seconds_are_those_of_the_fastest_of_several_calls(monkeypatch):
    times = iter([0.0, 0.0, 5.0, 5.0, 6.0, 6.0, 9.0, 9.0, 20.0])  # the start, and four calls
    monkeypatch.setattr(measured_machine.time, "perf_counter", lambda: next(times))
    calls = []
    assert measured_machine.seconds_of(lambda: calls.append(1)) == 1.0
    assert len(calls) == 4


def test_an_operations_time_is_a_share_of_a_pass(monkeypatch):
    """Of 16 layers with 35 operations each, and some outside."""
    monkeypatch.setattr(measured_machine, "seconds_of", lambda run: run() and 1.0)
    assert 16 * 35 < 1 / measured_machine.launch_seconds() < 16 * 36


def test_a_links_rate_counts_what_a_rank_receives_in_the_fastest_sum(monkeypatch):
    """Of 16 MiB by three ranks: two thirds of them are received twice."""
    times = iter([0.0, 9.0, 10.0, 14.0, 20.0, 22.0, 30.0, 37.0, 40.0, 45.0, 50.0, 53.0])
    monkeypatch.setattr(measured_machine.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(measured_machine.distributed, "world_size", lambda: 3)
    summed = []
    monkeypatch.setattr(measured_machine.dist, "all_reduce", lambda part: summed.append(part.numel()))
    assert measured_machine.link_rate() == pytest.approx(2 * 2 / 3 * 2**24 / 2)
    assert summed == [2**22] * 6
