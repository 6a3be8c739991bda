"""Models: loading, policy and value heads, packed inputs, sampling, tensor arithmetic."""
