"""Step 3: PPO with the reward model, from the SFT model to the chat model."""
