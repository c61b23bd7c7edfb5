"""How much RAM is free: what the system tells, and what control groups leave of it."""

from __future__ import annotations

import pytest
import torch

from cbgen.engine import memory
from cbgen.engine.memory import free_bytes, free_ram

KIB = 1024


@pytest.fixture
def machine(tmp_path):
    """Write files of a machine and return its free RAM; names are paths below proc or cgroup."""

    def make(**files: str) -> int:
        defaults = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   1000 kB\nBuffers: 7 kB\n"}
        for name, text in (defaults | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return free_ram(tmp_path / "proc", tmp_path / "cgroup")

    return make


def group(folder: str, limit: int | str, usage: int, stat: str = "") -> dict[str, str]:
    """Return the files of a control group of version 2."""
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def old_group(folder: str, limit: int, usage: int, stat: str = "") -> dict[str, str]:
    """Return the files of a control group of version 1."""
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def own(path: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"9:name=systemd:/\n0::{path}\n"}


def test_without_control_groups_free_memory_is_what_the_system_has_available(machine):
    assert machine() == 1000 * KIB


def test_free_memory_is_assumed_where_the_system_tells_nothing(tmp_path):
    assert free_ram(tmp_path / "proc", tmp_path / "cgroup") == 4 * 1024**3


def test_a_group_s_limit_less_its_usage_is_free(machine):
    assert machine(**own("/"), **group("cgroup", 900_000, 100_000)) == 800_000


def test_a_group_with_more_than_the_system_has_changes_nothing(machine):
    assert machine(**own("/"), **group("cgroup", 9_000_000, 0)) == 1000 * KIB


def test_a_group_without_limit_changes_nothing(machine):
    assert machine(**own("/"), **group("cgroup", "max", 100_000)) == 1000 * KIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    assert machine(**own("/"), **group("cgroup", 5000, 6000)) == 0


def test_the_group_of_the_process_counts_below_a_root_without_limit(machine):
    files = own("/slurm/job_1") | group("cgroup/slurm/job_1", 500_000, 200_000)
    assert machine(**files) == 300_000


@pytest.mark.parametrize(("outer", "inner"), [(500_000, 900_000), (900_000, 500_000)])
def test_the_tightest_of_nested_groups_counts(machine, outer, inner):
    files = own("/job/step") | group("cgroup/job", outer, 0) | group("cgroup/job/step", inner, 0)
    assert machine(**files) == 500_000


def test_groups_of_other_processes_do_not_count(machine):
    assert machine(**own("/a"), **group("cgroup/b", 1000, 0)) == 1000 * KIB


def test_a_throttling_limit_counts_like_a_hard_one(machine):
    files = own("/") | group("cgroup", "max", 100_000) | {"cgroup/memory.high": "300000\n"}
    assert machine(**files) == 200_000


def test_files_that_can_be_dropped_count_as_free(machine):
    stat = "anon 100\ninactive_file 50000\nactive_file 7\n"
    assert machine(**own("/"), **group("cgroup", 900_000, 100_000, stat)) == 850_000


def test_a_path_of_the_host_inside_a_container_leads_to_the_container_s_own_group(machine):
    files = own("/../docker/0123") | group("cgroup", 700_000, 100_000) | group(".", 1000, 0)
    assert machine(**files) == 600_000


def test_groups_of_version_1_count_too(machine):
    files = {"proc/self/cgroup": "5:cpu:/other\n4:hugetlb,memory:/job\n"}
    stat = "inactive_file 1\ntotal_inactive_file 30000\n"
    files |= old_group("cgroup/memory/job", 400_000, 100_000, stat)
    files |= old_group("cgroup/memory/other", 1000, 0)
    assert machine(**files) == 330_000


def test_the_root_group_counts_where_the_process_s_own_is_not_told(machine):
    assert machine(**group("cgroup", 900_000, 100_000)) == 800_000


def test_free_bytes_of_a_cpu_are_those_of_its_ram(monkeypatch):
    monkeypatch.setattr(memory, "free_ram", lambda: 17)
    assert free_bytes(torch.device("cpu")) == 17
