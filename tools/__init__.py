"""Tools above the steps: plans, checks of data and models, reports, machine diagnosis."""
