"""The sidecar beside each engine: fetches versions, activates them in one call, and knows what the engine serves."""
