"""Submitting through an Argo server, for those who may reach that and not the API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hera.exceptions import HeraException, InternalServerError
from hera.workflows import WorkflowsService
from hera.workflows.models import Workflow, WorkflowCreateRequest

from colchis.components.errors import BadConfig, PeerUnavailable


def submit(server: str, token: str, namespace: str, workflow: Mapping[str, Any]) -> str:
    """Create a Workflow; returns its name. BadConfig when the server refuses it, PeerUnavailable without an answer."""
    bearer = token if not token or token.startswith("Bearer ") else f"Bearer {token}"
    service = WorkflowsService(host=server.rstrip("/"), token=bearer or None, verify_ssl=server.startswith("https"))
    body = Workflow.model_validate(dict(workflow))
    try:
        created = service.create_workflow(WorkflowCreateRequest(workflow=body), namespace=namespace)
    except HeraException as error:
        if type(error) in (HeraException, InternalServerError):  # a status that Hera has no name for is a gateway's
            raise PeerUnavailable(f"the Argo server fails: {error}", where=server) from None
        raise BadConfig(
            f"the Argo server refuses the Workflow: {error}", where=server, hint="look at ARGO_TOKEN and the namespace"
        ) from None
    except OSError as error:
        raise PeerUnavailable(f"the Argo server cannot be reached: {error}", where=server) from None
    return str(created.metadata.name)
