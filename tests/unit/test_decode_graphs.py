"""What CUDA graphs ask of a decode step, run without a GPU: rounded shapes, and passes that run ahead."""

import pytest
import torch
from test_generate import load, make_prompts, options

from common.generation.decode import DecodeGraphs, round_positions, round_rows
from common.generation.generate import Generator


def test_shapes_are_rounded_up_within_the_block():
    assert [round_rows(n, 48) for n in (1, 2, 3, 5, 8, 9, 33, 48)] == [1, 2, 4, 8, 8, 16, 48, 48]
    assert [round_positions(n, 300) for n in (1, 128, 129, 257, 300)] == [128, 128, 256, 300, 300]


class PlainPasses(DecodeGraphs):
    """Runs the passes themselves in the shapes of their graphs."""

    def run(self, rows, upto, run_pass, state):
        self.graphs.setdefault((rows, upto), 0)
        run_pass(rows, upto)


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral_window"])
@pytest.mark.parametrize("num_slots", [3, 4])
def test_rounded_shapes_and_late_looks_change_no_text(family, num_slots, tiny_model_folder):
    model = load(tiny_model_folder(family))
    ids, mask = make_prompts(model.config.vocab_size)
    free = Generator(model).generate(ids, mask, torch.arange(4), options(seed=5, stop_token_id=-1))
    stop = int(free.response_ids[2, 3])  # ends some row early, between two looks
    chosen = options(seed=5, stop_token_id=stop)
    expected = Generator(model, num_slots=num_slots).generate(ids, mask, torch.arange(4), chosen)
    generator = Generator(model, num_slots=num_slots)
    generator.generate(ids, mask, torch.arange(4), chosen)
    step = generator._step
    step._graphs, step.passes_per_look = PlainPasses(model), 4
    found = generator.generate(ids, mask, torch.arange(4), chosen)
    assert generator._step is step and step._graphs.graphs
    assert found.response_mask.equal(expected.response_mask)
    assert found.response_ids.equal(expected.response_ids)
    assert found.is_finished.equal(expected.is_finished) and found.is_finished.any()
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def test_graphs_are_forgotten_when_a_weight_moves():
    model = torch.nn.Linear(2, 2)
    graphs = DecodeGraphs(model)
    graphs.check_weights()
    graphs.graphs[1, 128] = "captured"
    graphs.check_weights()
    assert graphs.graphs
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    graphs.check_weights()
    assert not graphs.graphs
