"""Eight- and four-bit numbers: exact rounding, blocks with scales, weights, records of caches."""
