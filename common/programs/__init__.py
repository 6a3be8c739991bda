"""Code of every program: start-up checks, and the training loop that steps 1 and 2 share."""
