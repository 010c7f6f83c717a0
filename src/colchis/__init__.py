"""Colchis: RL post-training of language models as Argo Workflows."""

import os

__version__ = "0.1.0"
__commit__ = os.environ.get("COLCHIS_COMMIT", "unknown")
"""The commit that an image was built from; outside images it is not known."""
