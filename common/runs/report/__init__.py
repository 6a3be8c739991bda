"""What runs have done, as one HTML file that needs no other: curves, samples, signs of reward hacking, time.

python -m tools.report RUN_DIR... [--output FILE]
"""
