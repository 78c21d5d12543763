"""The images behind the environments: how they are called, fetched from a registry, kept on a host, and dropped."""
