"""Where models come from: short names, local caches, the hub, and wheels.

``names`` says what a short name stands for, ``locate`` finds a model on this machine or fetches
it, ``pull`` moves bytes safely.
"""
