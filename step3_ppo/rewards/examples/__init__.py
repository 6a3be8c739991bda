"""Reward functions to use or to copy: `--reward function:step3_ppo.rewards.examples.length:brevity`."""
