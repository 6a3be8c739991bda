"""The DeepSpeed engine: ZeRO configuration, optimizer, one step on exact global means."""
