"""A private state that workers of other machines hold a share of."""

import pytest

from swarm.train.saving.checkpoint import load_private
from swarm.train.saving.hashed_file import folder_of
from tests.train.runs import new_engine, same
from tests.train.workers import test_nodes
from tests.train.workers.test_parallel import OWNED, RUN, save, train

key_file, key, nodes = test_nodes.key_file, test_nodes.key, test_nodes.nodes
agents, crews, parallel = test_nodes.agents, test_nodes.crews, test_nodes.parallel


@pytest.mark.parametrize("ep", [1, 3])
def test_what_other_machines_hold_alone_is_saved_by_the_controller(parallel, tmp_path, ep):
    engine, path = parallel(RUN, OWNED, ep=ep), tmp_path / "private"
    train(engine, RUN, range(2))
    save(path, engine.state_dict(), 1)
    (part,) = folder_of(path).iterdir()
    assert part.suffix == ".0", "of the only worker of this machine"
    own = b"master.model.layers" in path.read_bytes()
    assert own == (ep == 3)
    again = new_engine(RUN)
    again.load_state_dict(load_private(path).engine)
    states = [dict(sorted(each.state_dict().tensors.items())) for each in (engine, again)]
    assert same(*states)
