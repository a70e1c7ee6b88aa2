"""Training of draft models: answers of the target, blocks, losses, and the loop."""
