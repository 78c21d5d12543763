"""MegaFlow: runs tens of thousands of containerised agent tasks, and grades them.

Path of one task:

    enqueue -> admission -> Celery queue by mode -> worker on an instance -> environment -> agent <-> model
                                                                                             |
                                              waiting client <- outcome <- artifacts <- grading

Producers import from the package `megaflow`: `MegaFlow` accepts tasks, `AgentTask` describes one, `as_completed` waits
for many.
"""
