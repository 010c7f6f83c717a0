"""Typed, versioned records that live in the store. Formats are described in docs/store.md."""
