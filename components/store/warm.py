"""Imported by a process that forks stages: reads what every one of them would read again. Opens no connection."""

from colchis.components.store.requests import preload

preload()
