"""What a response earns before the KL penalty."""
