"""Many faults of servers, drawn by a seed: see support/servers/server_faults.py."""

import pytest
from doubles.sglang_server import LIES
from support.servers.server_commands import DOUBLE
from support.servers.server_faults import campaign

TIMEOUT = 10.0  # on a busy machine a server takes that long to come back


# Seeds by which servers die in a batch and in an update, and hang.
@pytest.mark.slow
@pytest.mark.parametrize(("faults", "seed"), [(30, 39), (200, 3)])
def test_faults_of_servers_cost_nothing_but_time(start, one_rank, model_folder, tmp_path, faults, seed):
    """No sample is damaged or stale, no call takes longer than the faults in its way explain, and the metrics count
    what was injected, no more and no less."""
    urls = [start(f"{DOUBLE} --returns 0.2") for _ in range(2)]
    found = campaign(seed, faults, urls, model_folder, tmp_path, TIMEOUT)
    assert found.faults.total() == faults and found.samples >= 12 * 2
    assert found.wrong == []
    assert found.counted == found.expected, found.faults
    assert found.expected["servers_lost"] > 0 and found.expected["syncs_retried"] > 0
    if faults >= 200:
        assert len(set(found.faults)) > len(LIES)  # most kinds were met
    # One hang, and pauses before requests are sent again.
    assert found.slowest < 5 * TIMEOUT
