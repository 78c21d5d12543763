"""The ways to run an environment: a container of an engine (`docker`), an OCI runtime (`oci`), `compose`, `local`."""
