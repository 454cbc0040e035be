"""Detected driver capabilities, on software drivers that are old, incomplete or failing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from softcuda.programs import reason_without_libraries

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)

INVALID_VALUE, NO_DEVICE, UNKNOWN = 1, 100, 999


def doctor(**environ: str) -> dict[str, Any]:
    """The "cuda" section of `umem doctor --json` on the software driver."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SOFTCUDA_", "UMEM"))}
    folder = os.environ["SOFTCUDA_LIB"]
    done = subprocess.run(
        [sys.executable, "-m", "umem", "doctor", "--json"],
        capture_output=True, text=True, check=False, timeout=120,
        env=inherited | {"LD_LIBRARY_PATH": folder} | environ,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1 where torch is not installed
    section = json.loads(done.stdout)["cuda"]
    assert isinstance(section, dict)
    return section


def values(section: dict[str, Any], *names: str) -> list[Any]:
    return [section[name]["value"] for name in names]


BATCHES = ("batch_prefetch", "discard", "discard_and_prefetch")


def test_a_driver_of_cuda_13_has_all_but_location_info() -> None:
    section = doctor()
    assert values(section, "available", "driver_version", *BATCHES, "location_info") == [
        True, 13000, True, True, True, False,
    ]  # fmt: skip
    (device,) = section["devices"]
    assert values(device, "name", "total_bytes", "pci_bus_id", "concurrent_managed_access") == [
        "umem softcuda 0", 256 << 20, "0000:01:00.0", True,
    ]  # fmt: skip


def test_a_newer_driver_can_tell_where_bytes_are() -> None:
    assert values(doctor(SOFTCUDA_VERSION="13040"), "available", "location_info") == [True, True]


def test_each_device_is_described() -> None:
    section = doctor(SOFTCUDA_DEVICES="2", SOFTCUDA_BYTES=str(64 << 20))
    assert [device["pci_bus_id"]["value"] for device in section["devices"]] == [
        "0000:01:00.0",
        "0000:02:00.0",
    ]
    assert {device["total_bytes"]["value"] for device in section["devices"]} == {64 << 20}


def test_a_driver_of_cuda_12_works_without_batches_and_discard() -> None:
    section = doctor(SOFTCUDA_VERSION="12080")
    assert values(section, "available", "driver_version", *BATCHES) == [
        True, 12080, False, False, False,
    ]  # fmt: skip


def test_an_entry_point_of_another_form_counts_as_missing() -> None:
    # CUDA 12.0 has a cuMemPrefetchAsync too, with other parameters.
    section = doctor(SOFTCUDA_VERSION="12000")
    assert section["available"]["value"] is False
    meaning = section["available"]["meaning"]
    assert "CUDA 12.0" in meaning
    assert "cuMemPrefetchAsync of CUDA 12.2; update the driver" in meaning


@pytest.mark.parametrize("name", BATCHES)
def test_one_missing_batch_call(name: str) -> None:
    entry = {
        "batch_prefetch": "cuMemPrefetchBatchAsync",
        "discard": "cuMemDiscardBatchAsync",
        "discard_and_prefetch": "cuMemDiscardAndPrefetchBatchAsync",
    }[name]
    section = doctor(SOFTCUDA_MISSING=entry)
    assert section["available"]["value"] is True
    assert [other for other in BATCHES if not section[other]["value"]] == [name]


def test_a_missing_entry_point_that_is_needed_is_named() -> None:
    section = doctor(SOFTCUDA_MISSING="cuMemAllocManaged,cuMemPrefetchBatchAsync")
    assert section["available"]["value"] is False
    assert "cuMemAllocManaged" in section["available"]["meaning"]


@pytest.mark.parametrize("without", ["0", "1"])
def test_the_device_without_concurrent_managed_access_is_named(without: str) -> None:
    section = doctor(SOFTCUDA_DEVICES="2", SOFTCUDA_NO_CMA=without)
    assert values(section, "available", "concurrent_managed_access") == [False, False]
    assert f"on device {without} (umem softcuda {without})" in section["available"]["meaning"]
    others = [device["concurrent_managed_access"]["value"] for device in section["devices"]]
    assert others == [without != "0", without != "1"]


def test_a_device_in_the_hosts_memory_evicts_nothing() -> None:
    section = doctor(SOFTCUDA_INTEGRATED="1")
    assert values(section, "available", "concurrent_managed_access") == [False, True]
    assert "share one memory" in section["available"]["meaning"]
    assert section["concurrent_managed_access"]["umem"] == "does not use it here"
    (device,) = section["devices"]
    assert device["integrated"]["value"] is True
    assert "evicts nothing" in device["integrated"]["umem"]


def test_a_driver_without_a_device() -> None:
    section = doctor(SOFTCUDA_FAIL=f"cuInit:1:{NO_DEVICE}")
    assert values(section, "available", "driver_version") == [False, 13000]
    assert section["available"]["meaning"] == "the NVIDIA driver sees no device"
    assert section["devices"] == []


@pytest.mark.parametrize(
    "entry",
    [
        "cuDriverGetVersion",
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceTotalMem",
    ],
)
def test_a_failing_call_is_the_reason(entry: str) -> None:
    section = doctor(SOFTCUDA_FAIL=f"{entry}:1:{UNKNOWN}")
    assert section["available"]["value"] is False
    assert f"{entry} failed: CUDA_ERROR_UNKNOWN" in section["available"]["meaning"]


def test_no_attribute_that_could_not_be_read_passes_for_an_absent_one() -> None:
    for nth in range(1, 8):
        section = doctor(SOFTCUDA_FAIL=f"cuDeviceGetAttribute:{nth}:{UNKNOWN}")
        assert section["available"]["value"] is False, nth
        assert "cuDeviceGetAttribute failed" in section["available"]["meaning"], nth
    assert doctor(SOFTCUDA_FAIL=f"cuDeviceGetAttribute:8:{UNKNOWN}")["available"]["value"] is True


def test_what_decides_how_umem_works_is_never_absent() -> None:
    for nth in (3, 4):  # managed memory, concurrent access
        section = doctor(SOFTCUDA_FAIL=f"cuDeviceGetAttribute:{nth}:{INVALID_VALUE}")
        assert section["available"]["value"] is False, nth
        assert "cuDeviceGetAttribute failed" in section["available"]["meaning"], nth


def test_an_attribute_that_the_driver_does_not_know_is_absent() -> None:
    section = doctor(SOFTCUDA_FAIL=f"cuDeviceGetAttribute:7:{INVALID_VALUE}")
    assert section["available"]["value"] is True
    assert section["devices"][0]["integrated"]["value"] is False


def test_a_device_without_a_bus_number_works() -> None:
    section = doctor(SOFTCUDA_MISSING="cuDeviceGetPCIBusId")
    assert section["available"]["value"] is True
    assert values(section["devices"][0], "pci_bus_id", "link_gb_per_s") == [None, None]
