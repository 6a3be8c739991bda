"""Step 3: PPO on the reward model, from the SFT model to the chat model."""
