"""Whether this machine can run the programs: versions, GPUs, kernels, locks, room, network, a training step.

python -m tools.doctor

Where torch, deepspeed or transformers are absent it says so: nothing here needs them to be imported.
"""
