"""The suite that every kind of environment passes, to be run on anybody's: needs pytest, which nothing else here does.

Describe yours once, in a module that Python finds:

    # my_ground.py
    from megaflow.contract.environments.ground import Ground
    GROUND = Ground("mine", "my-kind", my_provider, my_spec)

and run all of it:

    pytest -p megaflow.contract.environments.plugin --pyargs megaflow.contract.environments --ground my_ground

To have it among your own tests, write a `conftest.py` with a fixture `ground` (scope "module") and
`from megaflow.contract.environments.fixtures import *`, and a test file with
`from megaflow.contract.environments.test_commands import *` for each of the parts that you want.

Nothing outside of this package imports it.
"""
