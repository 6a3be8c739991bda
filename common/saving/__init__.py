"""What of a run is kept on disk: checkpoints that a run goes on from, and the exported models."""
