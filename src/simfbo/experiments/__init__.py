"""`simfbo reproduce`: the experiments of the SimFBO paper and their figures.

An experiment is a folder under benchmarks/: `experiment.toml` configures its runs, README.md
describes the results, results/ holds the histories. The wheel contains the configurations.
"""
