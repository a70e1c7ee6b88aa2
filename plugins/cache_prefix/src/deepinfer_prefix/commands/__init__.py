"""Commands of this plugin: what the cache holds and why it missed, and what it is worth."""
