"""Generators of pages in this folder; a package, so that no installed `docs` package is imported instead."""
