"""Many runs: sweeps, comparisons and tuning, with their tables and figures."""
