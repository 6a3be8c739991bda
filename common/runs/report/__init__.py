"""The report on runs: one HTML file with curves, samples, diagnostics of reward hacking, time, flags."""
