"""Every engine does what an engine must do. `DRYSTONE_NUM_SEEDS=20`: so many runs of random faults.

`-k local`, `-k simulated` ... runs one engine, `-k "local and hung_node"` one case.
"""

import os

import pytest
from conformance import CASES, LIVE, random_faults
from engine_local import LocalUnderTest
from engine_ray import RayUnderTest
from engine_simulated import SimulatedSystem, SimulatedUnderTest
from engine_slurm import SlurmUnderTest
from under_test import LiveSystem

REAL = (LocalUnderTest, RayUnderTest, SlurmUnderTest)
ENGINES = {one.name: one for one in (SimulatedUnderTest, *REAL)}
SECOND_TRY = {
    "simulated": [],
    "local": [],
    "ray": [pytest.mark.second_try("Ray")],
    "slurm": [pytest.mark.second_try("Slurm")],
}
NUM_SEEDS = int(os.environ.get("DRYSTONE_NUM_SEEDS", "2"))
FIRST_SEED = int(os.environ.get("DRYSTONE_FIRST_SEED", "1"))

pytestmark = pytest.mark.slow


def on_engines(function):
    """One cluster an engine; one worker has all the tests that need it."""
    engines = [
        pytest.param(name, marks=[pytest.mark.xdist_group(f"engine-{name}"), *SECOND_TRY[name]])
        for name in ENGINES
    ]
    return pytest.mark.parametrize("engine_name", engines, scope="module")(function)


@pytest.fixture(scope="module")
def shared_system(engine_name, tmp_path_factory):
    engine = ENGINES[engine_name]()
    if isinstance(engine, SimulatedUnderTest):
        yield None
        return
    try:
        engine.start(tmp_path_factory.mktemp(f"cluster-{engine_name}"))
        system = LiveSystem(engine, tmp_path_factory.mktemp(f"system-{engine_name}"))
        try:
            yield system
        finally:
            system.leave(ends_agents=True)
    finally:
        engine.close()


@pytest.fixture
def system(shared_system, engine_name):
    if shared_system is None:
        yield SimulatedSystem()
        return
    shared_system.reset()
    yield shared_system
    shared_system.heal()


@on_engines
@pytest.mark.parametrize("case", CASES)
def test_case(system, case):
    reason = system.engine.lacks.get(case)
    if reason:
        pytest.skip(f"{system.engine.name}: {reason}")
    CASES[case](system)


@on_engines
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_random_faults(system, seed):
    if isinstance(system, SimulatedSystem):
        system.random_faults(seed)
    else:
        random_faults(system, seed)


def test_what_an_engine_lacks_is_a_case():
    assert not {case for one in ENGINES.values() for case in one.lacks} - set(CASES)
    assert set(SimulatedUnderTest.lacks) == {one.__name__ for one in LIVE}
