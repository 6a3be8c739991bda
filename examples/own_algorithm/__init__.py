"""Your own advantage estimator."""
