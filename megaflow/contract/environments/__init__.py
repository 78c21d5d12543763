"""Test suite that every kind of environment must pass, also yours. It needs pytest; the rest of MegaFlow does not.

Describe yours once, in a module that Python finds:

    # my_fixture.py
    from megaflow.contract.environments.fixture import Fixture
    FIXTURES = Fixture("mine", "my-kind", my_provider, my_spec)

and run all of it:

    pytest -p megaflow.contract.environments.plugin --pyargs megaflow.contract.environments --fixture my_fixture

To add it to your own tests, write a `conftest.py` with a fixture `fixture` (scope "module") and
`from megaflow.contract.environments.fixtures import *`, and a test file with
`from megaflow.contract.environments.test_commands import *` for each part that you want.

No module outside of this package imports it.
"""
