"""`simfbo reproduce`: the experiments of the SimFBO paper and the figures they give.

An experiment is a folder under benchmarks/: `experiment.toml` says what is run, README.md what
came of it, results/ holds the histories. The wheel carries the configurations.
"""
