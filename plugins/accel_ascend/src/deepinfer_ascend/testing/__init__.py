"""How this backend is checked where there is no Ascend device, and what to run where there is one.

Nothing here is used while an engine runs.
"""
