"""DPO as a separate program."""
