"""Options: sources, precedence, values, errors."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import pwd
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import umem
from umem.base import host, trust
from umem.base.units import GIB, MIB
from umem.config import options
from umem.config import settings as config
from umem.config.parsers import Budget, Device, Disk
from umem.config.settings import Settings
from umem.errors import ConfigError, NotSupportedError
from umem.session.resolve import planning_policy, soft_budget


def load(tmp_path: Path, environ: dict[str, str] | None = None, **given: object) -> Settings:
    return config.load(given, environ=environ or {}, directory=tmp_path)


def write_pyproject(folder: Path, text: str) -> Path:
    """A file that only its owner can write, under any umask."""
    path = folder / "pyproject.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_defaults(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert settings.budget == Budget()
    assert settings.host_budget is None
    assert settings.policy == "auto"
    assert settings.min_swap == 2 * MIB
    assert settings.device == Device("auto")
    assert settings.torch_ext_cache == Path.home() / ".cache" / "umem"
    assert not settings.enabled
    assert not settings.strict
    assert not settings.guard


def test_each_source_overrides_the_next(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write_pyproject(tmp_path, '[tool.umem]\npolicy = "none"\nhost-budget = 1024\n')
    assert load(inner).policy == "none"
    assert load(inner).host_budget == 1024
    assert load(inner, {"UMEM_POLICY": "conv_lru"}).policy == "conv_lru"
    last = load(inner, {"UMEM_POLICY": "conv_lru"}, policy="lru", host_budget=None)
    assert (last.policy, last.host_budget) == ("lru", 1024)
    assert last.origins["policy"] == "policy="
    assert last.origins["host_budget"].startswith("host-budget in [tool.umem] of ")
    assert last.origins["budget"] == "budget (default)"


def test_only_the_nearest_pyproject_counts(tmp_path: Path) -> None:
    write_pyproject(tmp_path, '[tool.umem]\npolicy = "none"\n')
    inner = tmp_path / "inner"
    inner.mkdir()
    write_pyproject(inner, "[project]\nname = 'x'\n")
    assert load(inner).policy == "auto"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[tool.umem]\nbudgett = "1GiB"', "has no option 'budgett' (did you mean budget?)"),
        ('[tool.umem]\nbudget = "x"', "budget in [tool.umem] of "),
        ("[tool.umem]\nbudget = 1.5", "1.5 is a float"),
        ("[tool.umem]\npolicy = true", "True is a bool"),
        ("[tool.umem]\nenabled = true", "only the environment variable UMEM sets this option"),
        ("[tool.umem", "cannot be read"),
        ("[tool]\numem = 3", "must be a table"),
    ],
)
def test_bad_pyproject(tmp_path: Path, content: str, words: str) -> None:
    write_pyproject(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path / "pyproject.toml") in str(caught.value) or "environment" in words


@pytest.mark.parametrize("on", [True, False])
def test_the_socket_is_a_switch_too(tmp_path: Path, on: bool) -> None:
    assert load(tmp_path, top=on).top is on
    assert load(tmp_path, {"UMEM_TOP": "on" if on else "off"}).top is on


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("torch_ext_cache", '"/elsewhere"', "UMEM_TORCH_EXT_CACHE or torch_ext_cache="),
        ("torch-ext-cache", '"/elsewhere"', "UMEM_TORCH_EXT_CACHE or torch_ext_cache="),
        ("trace", '"precious.jsonl"', "UMEM_TRACE or trace="),
        ("trace", '"off"', "UMEM_TRACE or trace="),
        ("top", '"./top.sock"', "UMEM_TOP or top="),
        ("top", "true", "UMEM_TOP or top="),
    ],
)
def test_no_pyproject_names_a_path(tmp_path: Path, key: str, value: str, instead: str) -> None:
    """A file from a downloaded directory determines neither loads nor writes."""
    path = write_pyproject(tmp_path, f"[tool.umem]\n{key} = {value}\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{key} in [tool.umem] of {path}: ")
    assert f"use {instead}" in message


def test_every_option_whose_value_is_a_path_is_known_as_one() -> None:
    """A new one must not be taken from pyproject.toml either."""

    def takes_a_path(option: options.Option) -> bool:
        try:
            parsed = option.parse("./a/b.jsonl")
            return isinstance(getattr(parsed, "folder", parsed), Path)
        except ValueError:
            return False

    assert [option.name for option in options.OPTIONS if takes_a_path(option)] == [
        option.name for option in options.OPTIONS if option.is_path
    ]


MODES = [("file", 0o646), ("file", 0o664), ("folder", 0o757), ("folder", 0o1777), ("folder", 0o775)]


@pytest.mark.parametrize(("part", "mode"), MODES)
def test_a_pyproject_that_others_can_write_is_ignored_with_one_warning(
    tmp_path: Path, part: str, mode: int, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(trust, "_is_private", lambda group, user: False)
    path = write_pyproject(tmp_path, '[tool.umem]\npolicy = "none"\n')
    (path if part == "file" else tmp_path).chmod(mode)
    inner = tmp_path / "inner"
    inner.mkdir()
    assert load(inner).policy == load(tmp_path).policy == "auto"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in (str(path), "ignored", "can write", "chmod"):
        assert words in record.getMessage()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("part", ["file", "folder"])
def test_a_pyproject_of_another_user_is_ignored(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_pyproject(tmp_path, '[tool.umem]\npolicy = "none"\n')
    os.chown(path if part == "file" else tmp_path, 12345, -1)
    assert load(tmp_path).policy == "auto"
    assert "belongs to user 12345" in caplog.text


def test_the_warning_obeys_the_option_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pyproject(tmp_path, '[tool.umem]\npolicy = "none"\n').chmod(0o666)
    caplog.set_level(logging.WARNING, "umem")  # which also restores it
    load(tmp_path, {"UMEM_LOG": "error"})
    assert caplog.records == []


@pytest.mark.parametrize("text", ["[project]\n", "[tool.umem", "x = " + "[" * 5000])
def test_an_untrusted_pyproject_without_options_is_not_worth_a_word(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_pyproject(tmp_path, text).chmod(0o666)
    assert load(tmp_path).policy == "auto"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("group", "members", "private"),
    [
        ("ann", [], True),
        ("ann", ["ann"], True),
        ("ann", ["ann", "bob"], False),
        ("users", [], False),
    ],
)
def test_a_group_of_ones_own_is_not_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, members: list[str], private: bool
) -> None:
    """Many systems give each user a group, and a umask with which that group may write."""
    path = write_pyproject(tmp_path, '[tool.umem]\npolicy = "none"\n')
    path.chmod(0o664)
    owner = SimpleNamespace(pw_name="ann", pw_gid=path.stat().st_gid)
    found = SimpleNamespace(gr_name=group, gr_mem=members)
    monkeypatch.setattr(trust, "pwd", SimpleNamespace(getpwuid=lambda _: owner))
    monkeypatch.setattr(trust, "grp", SimpleNamespace(getgrgid=lambda _: found))
    assert load(tmp_path).policy == ("none" if private else "auto")
    owner.pw_gid += 1  # not the group that the user's files have
    assert load(tmp_path).policy == "auto"


def test_a_pyproject_of_endless_nesting_is_a_clear_error(tmp_path: Path) -> None:
    write_pyproject(tmp_path, "x = " + "[" * 5000)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_pyproject_takes_typed_values(tmp_path: Path) -> None:
    write_pyproject(tmp_path, "[tool.umem]\nbudget = 1048576\nguard = true\n")
    settings = load(tmp_path)
    assert settings.budget == Budget(bytes=MIB)
    assert settings.guard


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("UMEM_BUDGET", "auto", Budget()),
        ("UMEM_BUDGET", "8GiB", Budget(bytes=8 * GIB)),
        ("UMEM_BUDGET", "123", Budget(bytes=123)),
        ("UMEM_BUDGET", "80%", Budget(percent=80.0)),
        ("UMEM_HOST_BUDGET", "unlimited", 0),
        ("UMEM_HOST_BUDGET", "auto", None),
        ("UMEM_HOST_BUDGET", "1GiB", GIB),
        ("UMEM_DEVICE", "soft", Device("soft")),
        ("UMEM_DEVICE", "soft:64MiB", Device("soft", bytes=64 * MIB)),
        ("UMEM_DEVICE", "soft:a100-pcie4", Device("soft", profile="a100-pcie4")),
        ("UMEM_DEVICE", "soft:a100-pcie4:64MiB", Device("soft", "a100-pcie4", 64 * MIB)),
        ("UMEM_DEVICE", "cuda", Device("cuda")),
        ("UMEM_DEVICE", "cuda:8GiB", Device("cuda", bytes=8 << 30)),
        ("UMEM_GUARD", "on", True),
        ("UMEM_GUARD", "0", False),
        ("UMEM_LOG", "DEBUG", "debug"),
        ("UMEM_OBSERVER", "python", "python"),
        ("UMEM_TORCH_EXT_CACHE", "/var/x", Path("/var/x")),
        ("UMEM_BUDGET", "", Budget()),
    ],
)
def test_good_values(tmp_path: Path, name: str, value: str, expected: object) -> None:
    settings = load(tmp_path, {name: value})
    assert getattr(settings, options.BY_ENV[name].name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UMEM", "banana"),
        *(("UMEM_BUDGET", v) for v in ("banana", "12 parsecs", "0", "-1", "-5GiB", "0%", "101%")),
        *(("UMEM_HOST_BUDGET", v) for v in ("0", "many", "-1")),
        *(("UMEM_DEVICE", v) for v in ("gpu", "cuda:0", "cuda:1", "cuda:x", "cuda:8GiB:1")),
        *(("UMEM_DEVICE", v) for v in ("soft:", "auto:1")),
        *(("UMEM_DEVICE", v) for v in ("soft:1MiB", "soft:0", "soft:a:b", "soft:a:1:2")),
        ("UMEM_DEVICE", "soft::8MiB"),
        ("UMEM_MIN_SWAP", "-1"),
        ("UMEM_LOG", "loud"),
        ("UMEM_GUARD", "2"),
        ("UMEM_OBSERVER", "nativ"),
    ],
)  # fmt: skip
def test_bad_values_say_name_value_and_what_is_allowed(
    tmp_path: Path, name: str, value: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert options.BY_ENV[name].allowed in message
    assert "\n" not in message
    assert repr(value) in message


def test_an_unknown_variable_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"UMEM_BUGET='1'.*did you mean UMEM_BUDGET\?.*UMEM_LOG"):
        load(tmp_path, {"UMEM_BUGET": "1"})
    assert load(tmp_path, {"UMEMORY": "1", "NOT_UMEM_BUDGET": "x"}).budget == Budget()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bugdet": 1}, "umem has no option 'bugdet' (did you mean budget?)"),
        ({"budget": -1}, "budget=: '-1' is negative"),
        ({"budget": True}, "budget=: True is a bool"),
        ({"budget": 0.5}, "budget=: 0.5 is a float"),
        ({"enabled": True}, "only the environment variable UMEM"),
    ],
)
def test_bad_arguments(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **given)
    assert words in str(caught.value)


def test_flags_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--min-swap: 'x'"):
        config.load({"min_swap": "x"}, flags=True, environ={}, directory=tmp_path)


def test_equal_meaning_is_equal_settings(tmp_path: Path) -> None:
    by_call = load(tmp_path, budget=32 * MIB)
    by_environment = load(tmp_path, {"UMEM": "1", "UMEM_BUDGET": "32MiB", "UMEM_STRICT": "1"})
    assert by_call == by_environment
    assert by_call != load(tmp_path, budget="33MiB")


def resolve(tmp_path: Path, available: int | None = GIB, threads: int = 1, **given: Any) -> int:
    settings = load(tmp_path, **given)
    return soft_budget(settings, available=available, threads=threads)


def test_budgets_resolve(tmp_path: Path) -> None:
    assert resolve(tmp_path, budget="32MiB") == 32 * MIB
    assert resolve(tmp_path, budget="50%", device="soft:64MiB") == 32 * MIB
    assert resolve(tmp_path, device="soft:64MiB") == 64 * MIB
    assert resolve(tmp_path, available=GIB + 3) == 512 * MIB


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"budget": "4MiB"},
            "budget=: 4 MiB is below the floor of 16 MiB, which is 4 pages",
        ),
        ({"budget": "10%", "device": "soft:64MiB"}, "below the floor"),
        ({"budget": "50%"}, "budget=: 50% is a share of a software device without a size"),
        ({"budget": "128MiB", "device": "soft:64MiB"}, "more than the device's 64 MiB"),
        ({"available": None}, "auto cannot find out"),
        ({"available": 4 * MIB}, "below the floor"),
    ],
)
def test_budgets_that_cannot_be(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, **{"available": GIB, "threads": 2, **given})
    assert words in str(caught.value)
    assert "; allowed: " in str(caught.value)


def test_a_budget_has_as_many_mappings_as_the_kernel_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a page fault would end the process in the middle of the training."""
    monkeypatch.setattr(host, "total_memory", lambda: 256 * GIB)
    monkeypatch.setattr(host, "max_mappings", lambda: 65530)
    most = 40 * GIB
    assert resolve(tmp_path, available=128 * GIB) == most
    assert resolve(tmp_path, available=32 * GIB) == 16 * GIB
    assert resolve(tmp_path, budget=most) == most
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, budget="64GiB")
    said = str(caught.value)
    assert said.startswith("budget=: 64 GiB may need 102394 mappings of memory, and the kernel")
    assert said.endswith("or more after sysctl -w vm.max_map_count=102394")
    monkeypatch.setattr(host, "max_mappings", lambda: 102394)
    assert resolve(tmp_path, budget="64GiB") == 64 * GIB
    monkeypatch.setattr(host, "max_mappings", lambda: None)
    assert resolve(tmp_path, available=256 * GIB) == 128 * GIB


@pytest.mark.parametrize("option", ["disk", "torch_ext_cache", "trace"])
@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_path_is_refused(option: str, text: str) -> None:
    """As `--disk "$SCRATCH"` gives it where that variable is not set."""
    with pytest.raises(ConfigError, match=f"^{option}=.*the path is empty"):
        config.load({option: text}, environ={})


def test_a_disk_of_less_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="'1MiB' is less than 2 MiB"):
        config.load({"disk": "/fast:1MiB"}, environ={})


def test_environment_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("UMEM_POLICY", "none")
    monkeypatch.setenv("UMEM", "off")
    monkeypatch.setenv("UMEM_STRICT", "")  # as if it was not set
    environment = config.run_environment({"budget": "8GiB"})
    ours = {k: v for k, v in environment.items() if k.startswith("UMEM")}
    usual = {"UMEM_STRICT": "1", "UMEM_SUMMARY": "1"}
    assert ours == {**usual, "UMEM": "1", "UMEM_POLICY": "none", "UMEM_BUDGET": "8GiB"}
    loaded = config.load(environ=environment)
    assert (loaded.origins["budget"], loaded.origins["policy"]) == ("--budget", "UMEM_POLICY")
    changed = config.load(environ=environment | {"UMEM_BUDGET": "4GiB"})  # by the program
    assert changed.origins["budget"] == "UMEM_BUDGET"
    assert not [name for name in config.child_environment() if name.startswith("UMEM")]
    assert "PATH" in config.child_environment()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(NotSupportedError, match="unset it"):
        config.run_environment({})


def test_relative_paths_of_a_run_are_of_the_folder_in_which_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def plan(trace, device, budget): ...\n")
    typed = {"disk": "fast:2GiB", "trace": "t.jsonl", "policy": "mine.py:plan",
             "top": "run/top", "torch_ext_cache": "cache"}  # fmt: skip
    environment = config.run_environment(typed)
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    loaded = config.load(environ=environment)
    assert loaded.disk == Disk(tmp_path / "fast", 2 << 30)
    assert loaded.trace == tmp_path / "t.jsonl"
    assert loaded.policy == f"{tmp_path / 'mine.py'}:plan"
    assert loaded.top == tmp_path / "run/top"
    assert loaded.torch_ext_cache == tmp_path / "cache"
    assert loaded.origins["trace"] == "--trace"
    usual = {"disk": "off", "trace": "Off", "policy": "pack.mod:plan", "top": "on",
             "torch_ext_cache": "~/x"}  # fmt: skip
    environment = config.run_environment(usual)
    assert {name: environment[f"UMEM_{name.upper()}"] for name in usual} == usual


def test_the_program_of_a_run_names_the_option_that_was_typed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def plan(trace, device, budget): ...\n")
    place = f"{tmp_path / 'mine.py'}:plam"
    loaded = config.load(environ=config.run_environment({"policy": place}))
    with pytest.raises(ConfigError, match=r"^--policy: the policy '.*/mine.py:plam': .* has no"):
        planning_policy(loaded.policy, loaded.origins["policy"])


def test_the_table_the_settings_and_the_call_agree() -> None:
    names = {option.name for option in options.OPTIONS}
    assert names == {f.name for f in dataclasses.fields(Settings)} - {"origins"}
    settable = {option.name for option in options.SETTABLE}
    assert settable == set(inspect.signature(umem.enable).parameters)
    assert all(option.env.startswith("UMEM") for option in options.OPTIONS)
    assert len(options.BY_ENV) == len(options.OPTIONS) == len(options.BY_NAME)
    for option in options.OPTIONS:
        option.parse(option.default)


def test_no_directory_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("umem.base.paths.can_hold", lambda folder: False)
    monkeypatch.setattr("tempfile.gettempdir", none)
    assert load(tmp_path, {}).torch_ext_cache == Path("~/.cache/umem").expanduser()


def test_the_cache_follows_xdg(tmp_path: Path) -> None:
    assert load(tmp_path, {"XDG_CACHE_HOME": "/c"}).torch_ext_cache == Path("/c/umem")


def test_the_cache_is_elsewhere_if_the_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("no folder")  # root could write to a folder of any mode
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert load(tmp_path).torch_ext_cache == tmp_path / f"umem-cache-{os.getuid()}"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_folders_that_another_user_may_not_enter_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not in pytest's, which is for root alone
        top = Path(folder)
        for name, mode in ((".", 0o711), ("home", 0o700), ("work", 0o700), ("tmp", 0o777)):
            (top / name).mkdir(exist_ok=True)
            (top / name).chmod(mode)
        monkeypatch.setenv("HOME", str(top / "home"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(top / "home" / "run"))
        monkeypatch.setenv("TMPDIR", str(top / "tmp"))
        monkeypatch.setattr("tempfile.tempdir", None)
        if (child := os.fork()) == 0:
            try:
                os.setuid(65534)
                (top / "tmp").stat()
            except OSError:
                os._exit(77)
            try:
                assert load(top / "work").torch_ext_cache == top / "tmp/umem-cache-65534"
                assert config.runtime_directory() is None
                os._exit(0)
            except BaseException:  # noqa: BLE001 - ends this process
                traceback.print_exc()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 77:
        pytest.skip("there is no other user, or no folder for all")
    assert code == 0


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither HOME nor an entry in the table of users, as for `docker run --user 12345`."""

    def none(_: object) -> object:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", none)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_without_a_home_the_cache_is_in_the_directory_for_temporary_files(
    homeless: None, tmp_path: Path
) -> None:
    assert load(tmp_path).torch_ext_cache == tmp_path / f"umem-cache-{os.getuid()}"
    assert load(tmp_path, {"XDG_CACHE_HOME": "/c"}).torch_ext_cache == Path("/c/umem")
    assert load(tmp_path, torch_ext_cache="/d").torch_ext_cache == Path("/d")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UMEM_TORCH_EXT_CACHE", "~/cache"),
        ("UMEM_TORCH_EXT_CACHE", "~nosuchuser/cache"),
        ("UMEM_TRACE", "~nosuchuser/a.jsonl"),
        ("UMEM_TOP", "~nosuchuser/a.sock"),
    ],
)
def test_a_home_that_is_not_known_is_an_error_of_the_option(
    homeless: None, tmp_path: Path, name: str, value: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {name: value})
    home = value.partition("/")[0]
    assert str(caught.value).startswith(f"{name}: {value!r}: the directory {home} is not known")


@pytest.mark.parametrize(
    ("text", "seconds"), [("off", 0), ("30", 30), ("0.5", 0.5), (2.5, 2.5), (7, 7)]
)
def test_the_watchdog_takes_seconds(tmp_path: Path, text: object, seconds: float) -> None:
    assert load(tmp_path, watchdog=text).watchdog == seconds


@pytest.mark.parametrize("text", ["0", "-1", "1e18", "1e-12", "nan", "soon", True])
def test_the_watchdog_takes_nothing_else(tmp_path: Path, text: object) -> None:
    with pytest.raises(ConfigError, match="off, or seconds from"):
        load(tmp_path, watchdog=text)
