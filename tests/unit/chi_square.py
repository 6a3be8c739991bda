"""Chi-square tests of drawn numbers."""

import torch

NUM_DRAWS = 20_000
SMALLEST_P_VALUE = 1e-4  # the seeds are fixed, so a test that passes once passes always


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the chi-square test's p-value; 0 where something was seen that cannot be."""
    possible = expected > 0
    if observed[~possible].any():
        return 0.0
    statistic = ((observed - expected)[possible].double().square() / expected[possible]).sum()
    half_freedom = torch.tensor((possible.sum().item() - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half_freedom, statistic / 2).item()
