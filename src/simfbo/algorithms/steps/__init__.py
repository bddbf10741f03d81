"""Step sizes that no user has to choose: automatic and tuning-free ones."""
