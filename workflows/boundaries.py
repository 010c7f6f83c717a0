"""The containers of a reload's pod, by the boundary that each observes."""

from __future__ import annotations

BOUNDARIES = {"a-store": "store", "b-transfer": "transfer", "c-buffer": "buffer", "d-load": "load", "main": "cache"}
"""Container -> boundary, in the order in which they start. The last one is `main`: Argo wants a container of that name to
own the outputs. Their names sort in this order, because Argo's message of a pod is that of the first container, by name,
that failed: so it is the one that failed first, and not one that waited for it."""
