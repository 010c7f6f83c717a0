"""Accounts may do what docs/security.md says, and nothing else."""

from __future__ import annotations

from colchis.workflows.documents import Document
from tests.manifests.objects import find, pods
from tests.manifests.tables import table, words

Rights = dict[str, set[tuple[str, str]]]
"""Account -> (resource, verb)."""
ELSEWHERE = {"argo-controller": "the harness's controller", "colchis-users": "a group of people"}
"""Subjects that are no account of ours."""


def granted(documents: list[Document]) -> Rights:
    """What RoleBindings give to accounts, and what colchis-user would give."""
    rights: Rights = {name: set() for name in find(documents, "ServiceAccount")}
    roles = {name: body["rules"] for name, body in find(documents, "Role").items()}
    if "colchis-user" in roles:
        rights["colchis-user"] = _of(roles["colchis-user"])
    for name, body in find(documents, "RoleBinding").items():
        for subject in body["subjects"]:
            if subject["kind"] == "ServiceAccount":
                rights[subject["name"]] |= _of(roles[body["roleRef"]["name"]])
            else:
                assert subject["name"] in ELSEWHERE, f"{name} gives rights to {subject}"
    return rights


def _of(rules: list[dict[str, list[str]]]) -> set[tuple[str, str]]:
    return {
        (f"{resource}.{group}" if group else resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def documented() -> Rights:
    """The table."""
    rights: Rights = {}
    for account, verbs, resources in table("account", "may", "on"):
        given = rights.setdefault(account, set())
        if verbs != "nothing":
            given |= {(resource, verb) for resource in words(resources) for verb in words(verbs)}
    return rights


def test_accounts_may_do_what_the_table_says(documents: dict[str, list[Document]]) -> None:
    """Fault: a right that nobody wrote down, and one that is written down and missing."""
    expected = documented()
    for folder, found in documents.items():
        if folder.startswith("overlays/"):
            assert granted(found) == {k: v for k, v in expected.items() if k != "colchis-requester"}, folder
    assert granted(documents["gitops/flux"]) == {"colchis-requester": expected["colchis-requester"]}


def test_no_cluster_wide_rights(overlay: list[Document]) -> None:
    """Fault: an account that reaches into other namespaces, or everything in this one."""
    assert not {d.kind for d in overlay} & {"ClusterRole", "ClusterRoleBinding"}
    wildcards = [d.name for d in overlay if d.kind == "Role" and "*" in str(d.body["rules"])]
    assert wildcards == []


def test_stages_run_as_the_account_without_rights(overlay: list[Document]) -> None:
    """Fault: a stage that could submit or read workflows."""
    accounts = {p.name: p.spec.get("serviceAccountName") for p in pods(overlay)}
    assert accounts.pop("successor") == "colchis-submitter"
    assert accounts.pop("engine") == "colchis-engine"
    assert {accounts.pop(store, None) for store in ("seaweedfs", "minio")} == {None}
    assert set(accounts.values()) == {"colchis-workflow"}
