"""Code of your own, one folder each; a package, so that no installed `examples` is found in its place."""
