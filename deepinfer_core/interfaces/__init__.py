"""What a slot must do: one module per slot, types only, no torch at run time.

Each module holds the protocol of the slot's objects and the context its builders receive.
"""
