"""Examples of your own code, one folder each; a package, so that an installed `examples` is not imported
instead."""
