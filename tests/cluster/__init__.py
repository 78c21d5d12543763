"""Several hosts on one machine: network namespaces, with real servers and real workers."""
