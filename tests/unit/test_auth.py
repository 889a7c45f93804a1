"""Where the shared key comes from, and what is said of one that can't be used."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvferry.auth import AuthKey, check_reach, is_loopback, load_key, make_key_file
from kvferry.config import connector_config
from kvferry.connector.plugin import preflight
from kvferry.errors import ConfigError

TEXT = "0123456789abcdef" * 4


def write(path: Path, text: str | bytes = TEXT, mode: int = 0o600) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def test_setting_before_file_variable_before_key_variable(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", TEXT), write(tmp_path / "two", TEXT[::-1])
    environ = {"KVFERRY_AUTH_KEY_FILE": two, "KVFERRY_AUTH_KEY": "x" * 40}
    found = [load_key(one, environ), load_key("", environ), load_key("", {"KVFERRY_AUTH_KEY": "x" * 40})]
    assert [key.text for key in found if key is not None] == [TEXT, TEXT[::-1], "x" * 40]
    assert load_key("", {}) is None and load_key("", {"KVFERRY_AUTH_KEY_FILE": "", "KVFERRY_AUTH_KEY": ""}) is None


def test_blanks_around_a_key_are_none_of_it(tmp_path: Path) -> None:
    key, same = load_key(write(tmp_path / "k", f" {TEXT}\r\n")), AuthKey(TEXT, "elsewhere")
    assert key is not None and key.derive("side channel") == same.derive("side channel") and key.name == same.name


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("", 0o600, r"auth_key_file: \S+ is empty \(make a key with"),
        ("\n \n", 0o600, "is empty"),
        ("secret", 0o600, r"has 6 characters \(expected 32 to 4096"),
        ("x" * 5000, 0o600, "expected 32 to 4096"),
        (b"\xff\xfe" * 32, 0o600, "is no text"),
        (TEXT, 0o644, r"open to every user of this machine \(mode 0644\) \(`chmod 600 "),
        (TEXT, 0o602, r"mode 0602"),
    ],
)
def test_a_file_that_is_no_good_is_one_line(tmp_path: Path, text: str | bytes, mode: int, said: str) -> None:
    path = write(tmp_path / "k", text, mode)
    with pytest.raises(ConfigError, match=said) as raised:
        load_key(path)
    assert "\n" not in str(raised.value) and path in str(raised.value)
    if isinstance(text, str) and text.strip():
        assert text not in str(raised.value), "the key itself is told nobody"


def test_missing_file_names_the_setting_it_came_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\$KVFERRY_AUTH_KEY_FILE: /nowhere/k: No such file"):
        load_key("", {"KVFERRY_AUTH_KEY_FILE": "/nowhere/k"})
    with pytest.raises(ConfigError, match=r"^auth_key_file: .*Is a directory"):
        load_key(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^\$KVFERRY_AUTH_KEY has 3 characters"):
        load_key("", {"KVFERRY_AUTH_KEY": "abc"})


def test_the_group_may_read_it_as_orchestrators_mount_secrets(tmp_path: Path) -> None:
    os.symlink(write(tmp_path / "k", TEXT, 0o440), tmp_path / "link")
    assert load_key(str(tmp_path / "link")) is not None


def test_a_fresh_file_each_time_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "auth.key"
    write(path, "old", 0o666)
    os.umask(os.umask(0))  # whatever it is
    make_key_file(path)
    first = load_key(str(path))
    make_key_file(path)
    second = load_key(str(path))
    assert first is not None and second is not None and first.text != second.text and len(first.text) == 64
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_is_known_by_its_name_and_told_nowhere() -> None:
    key, other = AuthKey(TEXT, "/k"), AuthKey(TEXT + "x", "/k")
    assert re.fullmatch("[0-9a-f]{8}", key.name) and key.name != other.name
    assert TEXT not in repr(key) + str(key) and str(key) == f"key {key.name} from /k"
    assert key.derive("side channel") != key.derive("other") and len(key.derive("side channel")) == 32


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "::1%lo"])
def test_loopback_needs_no_key(host: str) -> None:
    check_reach(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "*", "p.example", "fe80::1", "localhost.example", ""])
def test_beyond_loopback_it_does(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"no key is set: .* binds to loopback only \(set auth_key"):
        check_reach(host, None)
    check_reach(host, AuthKey(TEXT, "x"))


def test_vllm_ends_in_its_first_second_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_AUTH_KEY_FILE", raising=False)
    monkeypatch.delenv("KVFERRY_AUTH_KEY", raising=False)

    def start(**extra: object) -> None:
        import json

        ours = {"kv_connector": "KVFerryConnector", "kv_connector_extra_config": {"side_channel_port": 1, **extra}}
        preflight(["api_server.py", "--kv-transfer-config", json.dumps(ours)])

    with pytest.raises(ConfigError, match="no key is set"):
        start(side_channel_host="192.0.2.1")
    with pytest.raises(ConfigError, match="is empty"):
        start(side_channel_host="192.0.2.1", auth_key_file=write(tmp_path / "k", ""))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:1 cannot be used"):  # the next thing that is wrong with it
        start(side_channel_host="192.0.2.1", auth_key_file=write(tmp_path / "k", TEXT))


def test_the_settings_hold_the_path_and_never_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "k", TEXT)
    config = connector_config({"auth_key_file": path}, {})
    assert config.auth_key_file == path and TEXT not in repr(config)
