"""Adapters of data sets. Importing this package registers those that have a name."""

from common.data.adapters import public_sets as public_sets
