"""Reports of `umem doctor` on CUDA drivers and devices that this machine need not have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from umem.cli import doctor, doctor_cuda, doctor_disk, doctor_link, main
from umem.config import settings as config
from umem.errors import ConfigError
from umem.integrations.torch import build

MIB = 1 << 20


def device(**changed: object) -> dict[str, Any]:
    return {
        "name": "NVIDIA H200",
        "pci_bus_id": "",
        "total_bytes": 141 << 30,
        "compute_capability": "9.0",
        "managed_memory": True,
        "concurrent_managed_access": True,
        "pageable_memory_access": False,
        "pageable_uses_host_page_tables": False,
        "integrated": False,
    } | changed


def probe(**changed: object) -> Any:
    return {
        "available": True,
        "reason": "",
        "driver_version": 13000,
        "concurrent_managed_access": True,
        "batch_prefetch": True,
        "discard": True,
        "discard_and_prefetch": True,
        "location_info": False,
        "devices": [device()],
    } | changed


def facts_of(section: dict[str, Any]) -> list[dict[str, Any]]:
    return [fact for name, fact in section.items() if name != "devices"] + [
        fact for row in section.get("devices", []) for fact in row.values()
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"batch_prefetch": False, "discard": False, "discard_and_prefetch": False},
        {"available": False, "reason": "no such luck", "concurrent_managed_access": False},
        {"available": False, "reason": "no device", "devices": []},
        {"devices": [device(integrated=True, pageable_memory_access=True)]},
    ],
)
def test_every_fact_has_a_meaning_and_a_consequence(changed: dict[str, object]) -> None:
    section = doctor_cuda.facts(probe(**changed))
    assert len(section) > 5
    for fact in facts_of(section):
        assert set(fact) == {"value", "meaning", "umem"}
        assert fact["meaning"]
        assert fact["umem"]


def test_without_a_driver_there_is_nothing_but_the_reason() -> None:
    section = doctor_cuda.facts(probe(available=False, reason="no libcuda", driver_version=0))
    assert list(section) == ["available"]
    assert section["available"]["value"] is False
    assert section["available"]["meaning"] == "no libcuda"


def test_what_the_driver_lacks_has_a_consequence_of_its_own() -> None:
    section = doctor_cuda.facts(probe())
    lacking = dict.fromkeys(("batch_prefetch", "discard", "discard_and_prefetch"), False)
    older = doctor_cuda.facts(probe(**lacking, driver_version=12080))
    for name in (*lacking, "driver_version"):
        assert section[name]["umem"] != older[name]["umem"]
    assert older["driver_version"]["value"] == 12080


def test_where_managed_memory_cannot_be_used_no_fact_promises_anything() -> None:
    section = doctor_cuda.facts(probe(available=False, concurrent_managed_access=False))
    assert section["discard"]["value"] is True
    assert "does not use" in section["discard"]["umem"]
    assert "plain device memory" in section["concurrent_managed_access"]["umem"]


@pytest.mark.parametrize(
    ("name", "vgpu", "mig"),
    [
        ("NVIDIA A10-8Q", True, False),
        ("NVIDIA A100-4-20C", True, False),
        ("NVIDIA A100-1-5CME", True, False),
        ("GRID V100D-16Q", True, False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", False, True),
        ("NVIDIA A100-SXM4-80GB", False, False),
        ("NVIDIA GeForce RTX 4090", False, False),
        ("NVIDIA RTX 6000 Ada Generation", False, False),
        ("Quadro RTX 8000", False, False),
    ],
)
def test_shares_of_a_gpu_are_told_by_their_names(name: str, vgpu: bool, mig: bool) -> None:
    assert doctor_cuda.is_vgpu(name) is vgpu
    assert doctor_cuda.is_mig(name) is mig
    meaning = doctor_cuda.facts(probe(devices=[device(name=name)]))["devices"][0]["name"]["meaning"]
    assert ("virtual" in meaning, "MIG" in meaning) == (vgpu, mig)


def test_the_text_shows_each_device_and_what_its_facts_mean() -> None:
    section = doctor_cuda.facts(probe(devices=[device(), device(name="NVIDIA A10-8Q")]))
    text = doctor.render({"cuda": section})
    assert "driver version" in text
    assert " 13.0\n" in text
    assert "0: name" in text
    assert "1: name" in text
    assert "141 GiB" in text
    meaning = section["discard"]["meaning"]
    assert f"{meaning}; umem {section['discard']['umem']}" in text


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The verdict on a machine with that driver, torch and options."""
    from umem.base.native import core

    load = config.load

    def verdict(found: Any, torch_cuda: str | None, **options: str) -> dict[str, Any]:
        settings = load(options, environ={})
        monkeypatch.setattr(core, "probe_cuda", lambda: found)
        monkeypatch.setattr(doctor, "_torch_version", lambda: "2.11.0")
        monkeypatch.setattr(doctor, "_torch_cuda", lambda: torch_cuda)
        monkeypatch.setattr(doctor, "load", lambda: settings)
        monkeypatch.setitem(sys.modules, "torch", None)  # doctor never imports it
        return doctor._verdict()

    return verdict


@pytest.mark.parametrize(
    ("budget", "count", "words"),
    [("64MiB", 64 * MIB, ""), ("auto", None, "free memory"), ("80%", None, "80% of its memory")],
)
def test_a_gpus_budget_is_resolved_at_first_use(
    machine_with: Callable[..., dict[str, Any]], budget: str, count: int | None, words: str
) -> None:
    verdict = machine_with(probe(), "13.0", budget=budget, device="cuda")
    assert (verdict["works"], verdict["device"]) == (True, "cuda")
    assert verdict["memory"] == "managed"
    assert verdict["budget_bytes"] == count
    assert words in verdict.get("budget", "")


def test_the_device_is_what_driver_and_torch_can_use(
    machine_with: Callable[..., dict[str, Any]],
) -> None:
    none = probe(available=False, reason="no libcuda", driver_version=0, devices=[])
    plain = probe(available=False, reason="a device pages nothing")
    size = {"budget": "64MiB"}
    assert machine_with(probe(), "13.0", **size)["device"] == "cuda"
    assert machine_with(plain, "13.0", **size)["memory"].startswith("plain")
    assert machine_with(probe(), None, **size)["device"].startswith("soft:")
    assert machine_with(none, "13.0", **size)["device"].startswith("soft:")
    assert machine_with(probe(), "13.0", device="soft", **size)["device"].startswith("soft:")


def test_a_device_that_was_asked_for_and_cannot_be_had(
    machine_with: Callable[..., dict[str, Any]],
) -> None:
    none = probe(available=False, reason="no libcuda", driver_version=0, devices=[])
    verdict = machine_with(none, "13.0", device="cuda")
    assert verdict == {
        "works": False,
        "because": "device=: no libcuda; allowed here: soft, which is for torch's CPU tensors "
        "and umem.Buffer",
    }
    verdict = machine_with(probe(), None, device="cuda")
    assert verdict["works"] is False
    assert "without CUDA" in verdict["because"]


def test_the_verdict_is_no_where_the_extension_is_missing_and_cannot_be_built(
    machine_with: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: dict[str, list[str]] = {"built": []}
    monkeypatch.setattr(doctor, "_extension", lambda: built)
    options = {"device": "soft", "budget": "64MiB"}
    good, bad = str(tmp_path / "cache"), str(tmp_path / "file" / "cache")
    (tmp_path / "file").write_text("")
    assert machine_with(probe(), None, torch_ext_cache=good, **options)["works"] is True
    verdict = machine_with(probe(), None, torch_ext_cache=bad, **options)
    assert verdict["works"] is False
    assert f"{bad} for the torch extension cannot be written" in verdict["because"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    verdict = machine_with(probe(), None, torch_ext_cache=good, **options)
    assert verdict["works"] is False
    assert "no C++ compiler was found" in verdict["because"]
    built["built"] = ["extension.so"]  # of this torch or of another
    monkeypatch.setattr(build, "find_or_build", lambda _: Path("extension.so"))
    assert machine_with(probe(), None, torch_ext_cache=bad, **options)["works"] is True


def test_a_gpu_needs_no_extension(
    machine_with: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_extension", lambda: {"built": []})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    options = {"device": "cuda", "budget": "64MiB"}
    verdict = machine_with(probe(), "13.0", **options)
    assert verdict["works"] is True
    assert "pluggable allocator and an observer in Python" in verdict["slower"]
    assert "no C++ compiler was found" in verdict["slower"]
    for needs in ({"allocator": "subclass"}, {"observer": "native"}, {"backing": "mapped"}):
        verdict = machine_with(probe(), "13.0", **options, **needs)
        assert verdict["works"] is False
        assert "no C++ compiler was found" in verdict["because"]


def test_without_torch_other_libraries_can_use_umem(
    machine_with: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": "soft", "budget": "64MiB", "allocator": "none"}
    machine_with(probe(), None, **options)
    monkeypatch.setattr(doctor, "_torch_version", lambda: None)
    monkeypatch.setattr(doctor, "_extension", lambda: {"built": []})
    monkeypatch.setenv("PATH", "")
    assert doctor._verdict()["works"] is True
    for device in ("cuda", "auto"):
        verdict = machine_with(probe(), None, **options | {"device": device})
        assert (verdict["works"], verdict["device"]) == (True, "cuda")


def test_what_cannot_be_measured_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor_link, "measure", broken)
    found = doctor.examine(measure=True)
    assert "torch is not installed" in found["host"]["problem"]
    assert found["link"]["problem"] == "libcudart.so.13: cannot open shared object file"


def broken() -> dict[str, Any]:
    raise OSError("libcudart.so.13: cannot open shared object file")


def test_absent_values_are_null_in_json_and_words_in_text() -> None:
    facts: Any = {"torch": {"version": None, "problem": None}, "torch extension": {"built": []}}
    text = doctor.render(facts)
    assert "not installed" in text
    assert "not yet" in text


def test_the_host_is_measured_on_request() -> None:
    pytest.importorskip("torch")
    assert "host" not in doctor.examine()
    found = doctor.examine(measure=True)
    assert "link" in found["link"] or "the link is not measured" in found["link"]["problem"]
    host = found["host"]
    assert host["threads"] >= 1
    assert 0.01 < host["copy_gb_per_s"] < 1e4
    assert 0.01 < host["host_gb_s"] < 1e4
    assert "host gb s" in doctor.render({"host": host})


def test_a_disk_is_measured_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_disk, "SECONDS", 0.05)
    found = doctor_disk.measure(tmp_path, file_bytes=8 << 20)
    assert [*tmp_path.iterdir()] == []
    rates = ("read_gb_s", "write_gb_s", "read_beside_writes_gb_s", "write_beside_reads_gb_s")
    assert all(0 < found[name] < 1e3 for name in rates)
    assert found["free_bytes"] > 0
    link = f"{found['read_beside_writes_gb_s']:.3g},{found['write_beside_reads_gb_s']:.3g}"
    assert found["link"] == f"--link {link}"
    assert "read gb s" in doctor.render({"disk": found})
    assert main(["doctor", "--disk", str(tmp_path)]) == 2
    assert "allowed: umem doctor --measure --disk DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/dev/shm", "in this machine's memory"), ("/no/such", "No such file"), ("/proc", ".")],
)
def test_what_is_no_disk_is_refused(folder: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"--disk {folder}: .*{reason}.*allowed: a folder on"):
        doctor_disk.measure(Path(folder), file_bytes=8 << 20)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("ext4", None), ("nfs4", "network"), ("fuse.sshfs", "network"), ("btrfs", "copies on write")],
)
def test_file_systems_that_do_not_suit_have_a_warning(kind: str, words: str | None) -> None:
    warning = doctor_disk.warning(kind)
    assert warning is None if words is None else words in (warning or "")


def test_without_torch_the_verdict_says_how_to_install_it(
    machine_with: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_with(probe(), None, device="soft", budget="64MiB")["works"] is True
    monkeypatch.setattr(doctor, "_torch_version", lambda: None)
    verdict = doctor._verdict()
    assert verdict["works"] is False
    assert "torch is not installed; install it with `pip install" in verdict["because"]


def test_a_disk_that_umem_refuses_is_no_yes(
    machine_with: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    soft = {"device": "soft", "budget": "64MiB"}
    assert machine_with(probe(), None, **soft, disk=str(tmp_path))["works"] is True
    verdict = machine_with(probe(), None, **soft, disk=str(tmp_path / "absent"))
    assert verdict["works"] is False
    assert "No such file or directory; allowed: a folder on a disk" in verdict["because"]


def test_a_host_budget_without_a_limit_has_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMEM_HOST_BUDGET", "unlimited")
    monkeypatch.setenv("UMEM_BUDGET", "64MiB")
    options = doctor._options()
    assert options["host_budget"] == {"value": "unlimited", "origin": "UMEM_HOST_BUDGET"}
    assert options["disk_writes"] == {"value": "unlimited", "origin": "default"}
    assert options["budget"]["value"] == 64 * MIB


def test_a_limit_of_writes_is_shown_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMEM_DISK_WRITES", "1.5TB/day")
    options = doctor._options()
    assert options["disk_writes"]["value"] == 1_500_000_000_000
    assert "1.5TB/day  [UMEM_DISK_WRITES]" in doctor.render({"options": options})
