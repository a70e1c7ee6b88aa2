"""Tiers of pages behind the device: host memory, disk, and both in a row; and how to reach them."""
