"""What the pages of this folder are made by; a package, so that no installed `docs` is found in its place."""
