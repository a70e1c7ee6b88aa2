"""Measures engines: workloads, loads, percentiles and the two Pareto pictures."""
