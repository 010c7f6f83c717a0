"""The test cluster: a real Kubernetes with a real Argo controller in one private namespace of this machine.

No Docker, no image registry, nothing left on the host: everything is built from package registries (build.py), runs as
children of one process in its own mount, network and pid namespaces (cluster.py, inner.sh), and ends with that process.
"""
