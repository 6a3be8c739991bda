"""Adapters: what a row means. Importing this package registers those of the data sets by name."""

from common.data.adapters import public_sets as public_sets
