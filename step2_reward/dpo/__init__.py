"""DPO under a program name of its own."""
