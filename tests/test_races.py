"""benchmarks/races.py on a machine without a GPU: what cubins tell of synchronisation, and how logs are read."""

import re

import pytest
import races

from flash_kda.sm90 import build

needs_compiler = pytest.mark.skipif(build.compiler_problem() is not None, reason=str(build.compiler_problem()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("races")
    build.build(out / "controls", [races.CONTROLS[name][0] for name in ("relay", "relay_unsynced")], line_info=True)
    return out


def offset(cubin, line_of, instruction):
    """Of the first such instruction that comes from a line with this text."""
    source = (races.HERE / "race_controls.py").read_text().splitlines()
    for at, place in races.places(cubin).items():
        name, line = place.line.split(":")
        if name == "race_controls.py" and line_of in source[int(line) - 1] and instruction in place.instruction:
            return at
    raise AssertionError(f"no {instruction} from {line_of}")


@needs_compiler
def test_warp_barriers_are_told_where_the_source_has_them(folder):
    synced, unsynced = (line for line in races.told(folder).splitlines() if line.startswith("| relay"))
    assert re.search(r"\| 8 \| (\d+) \|", synced)
    assert "relay_tile" in synced
    assert "relay_tile" not in unsynced
    # the arrival that announces the bytes of a TMA load is the one that the compiler does not list
    assert "1 SYNCS.ARRIVE.TRANS64 (race_controls.py:" in synced


@needs_compiler
def test_a_log_is_read_to_pairs_of_source_lines(folder, tmp_path):
    cubin = folder / "controls" / "relay.cubin"
    wrote, read = offset(cubin, "rows.store(y", "ST"), offset(cubin, "x = tile_s.index(s).load(L)", "LD")
    function = next(label for label in races.labels(cubin) if "relay_tile" in label)
    (tmp_path / "1.0--relay.log").write_text(
        f"========= Error: Race reported between Write access at {function}+0x{wrote - races.labels(cubin)[function]:x}\n"
        f"=========     and Read access at relay+0x{read:x} in race_controls.py:1 [64 hazards]\n"
        f"========= Warning: Race reported between Write access at relay+0x{wrote:x}\n"
        f"=========     and Write access at relay+0x{wrote:x} [2 hazards]\n"
        "========= Error: Potential RAW hazard detected at __shared__ 0x40 in block (0,0,0) :\n"
        f"=========     Write Thread (160,0,0) at relay+0x{wrote:x}\n"
        f"=========     Read Thread (3,0,0) at relay+0x{read:x}\n"
    )
    (tmp_path / "1.0--relay.out").write_text("right: True\nkernels: relay\n\nexit: 0, 3 s\n")
    summary, details = races.report(folder, tmp_path)
    assert summary.splitlines()[-1] == "| 1.0 | relay | none | True | 1 | 1 | 0 | 3 |"
    assert re.search(
        r"64  Error  \|  Write relay_tile race_controls.py:\d+ STS\w*\S*  \|  Read default: relay_consumer", details
    )
    assert re.search(r"1  Error RAW  \|  other warp  \|  relay_tile .*  \|  default: relay_consumer", details)
