"""Who comes in: admission, keys, limits, connections and certificates."""
